// Marks what libposembed.so shows its users; every other symbol is hidden.
#pragma once

#define POSEMBED_API __attribute__((visibility("default")))
