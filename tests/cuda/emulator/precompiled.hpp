// What toolchain.py compiles once for each variant. Its own file, since a main file must not say `pragma once`.
#include "emulator.hpp"
