#include "memory.h"

const struct memory memory_host = {.platform = "cpu", .host = true};
