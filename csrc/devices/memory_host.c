#include "devices/memory.h"

#define SPACE host
#include "xla/handlers.h"

const struct memory memory_host = {.platform = "cpu", .host = true, .handlers = handlers};
