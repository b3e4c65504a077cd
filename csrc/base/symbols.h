/* Functions of shared libraries, looked up by name. Threads: called under the GIL. */
#ifndef JAXMPI_SYMBOLS_H
#define JAXMPI_SYMBOLS_H

#include <stdbool.h>
#include <stddef.h>

/* A function to look up in a library; the address is stored at `offset` in a structure. */
struct symbol {
  const char *name; /* NULL at the end of a list */
  size_t offset;
  bool required;
};

/* Fill `table`, with NULL for a missing function. Return the name of the first missing function that is required, or
 * NULL. */
const char *symbols_load(void *library, const struct symbol *symbols, void *table);

/* Store the address of one function, NULL if the library has no function of this name. Return whether it has one. */
bool symbol_find(void *library, const char *name, void *function);

#endif
