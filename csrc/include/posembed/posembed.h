/// All of posembed for C++. Link `PosEmbed::posembed`, from `find_package(PosEmbed)`.
#pragma once

#include "posembed/alibi.h"
#include "posembed/bag.h"
#include "posembed/build_info.h"
#include "posembed/configuration.h"
#include "posembed/errors.h"
#include "posembed/input.h"
#include "posembed/learned.h"
#include "posembed/memory.h"
#include "posembed/pretrained.h"
#include "posembed/relative_bias.h"
#include "posembed/rotary.h"
#include "posembed/rotary_cache.h"
#include "posembed/rotary_norm.h"
#include "posembed/rotary_tables.h"
#include "posembed/sinusoidal.h"
#include "posembed/token.h"
