#include "base/symbols.h"

#include <dlfcn.h>
#include <string.h>

/* dlsym returns an object pointer, which ISO C does not let us cast to a function pointer. */
bool symbol_find(void *library, const char *name, void *function) {
  void *symbol = dlsym(library, name);
  memcpy(function, &symbol, sizeof symbol);
  return symbol != NULL;
}

const char *symbols_load(void *library, const struct symbol *symbols, void *table) {
  const char *missing = NULL;
  for (; symbols->name != NULL; symbols++)
    if (!symbol_find(library, symbols->name, (char *)table + symbols->offset) && symbols->required && missing == NULL)
      missing = symbols->name;
  return missing;
}
