/* The memory spaces that the package knows.
 *
 * A space has a row in spaces.def and a file memory_NAME.c, which defines `memory_NAME`.
 *
 * Threads: the functions are called under the GIL. */
#ifndef JAXMPI_SPACES_H
#define JAXMPI_SPACES_H

#include "base/memory.h"

#define SPACE(name) extern const struct memory memory_##name;
#include "devices/spaces.def"
#undef SPACE

extern const struct memory *const memory_spaces[]; /* ends with NULL; the host is the first */

/* Return whether this process has loaded the driver's library of a space. */
bool memory_loaded(const struct memory *memory);

/* Load the driver of a space at the first call. Return NULL, or why arrays of the space cannot be communicated. */
const char *memory_open(const struct memory *memory);

#endif
