#include "core/runtime.h"

#include <limits.h>

struct runtime runtime = {.most_tag = INT_MAX, .max_count = INT_MAX, .lock = PTHREAD_MUTEX_INITIALIZER};
_Thread_local bool importer;
