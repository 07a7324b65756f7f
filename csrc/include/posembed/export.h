// Marks the public symbols of libposembed.so; all others are hidden.
#pragma once

#define POSEMBED_API __attribute__((visibility("default")))
