/* A text that is put together piece by piece: in an array, at whose end it is cut, or in memory that grows.
 *
 * Threads: pure functions; a text belongs to one thread. */
#ifndef JAXMPI_TEXT_H
#define JAXMPI_TEXT_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

struct text {
  size_t length, room; /* without and with the zero at the end */
  char *characters;
  bool grows; /* `characters` is memory of malloc, or NULL */
  bool cut;   /* there was no room for all of it */
};

/* Bytes that are enough for most reports. */
enum { TEXT_BYTES = 2048 };

/* An empty text in an array of `size` bytes. */
static inline struct text text_in(char *array, size_t size) {
  *array = '\0';
  return (struct text){.room = size, .characters = array};
}

/* Append by printf. */
__attribute__((format(printf, 2, 3))) void text_add(struct text *text, const char *format, ...);
__attribute__((format(printf, 2, 0))) void text_add_arguments(struct text *text, const char *format, va_list arguments);

/* Append `count` characters. */
void text_add_characters(struct text *text, const char *characters, size_t count);

/* Drop all but the first `length` characters, and keep the memory. */
static inline void text_shorten(struct text *text, size_t length) {
  text->length = length, text->cut = false;
  if (text->room > 0) text->characters[length] = '\0';
}

#endif
