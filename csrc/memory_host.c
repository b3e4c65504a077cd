#include "memory.h"

const struct memory memory_host = {.platform = "cpu", .begin = NULL, .end = NULL};
