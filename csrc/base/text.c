#include "base/text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Make room for `more` characters, if the text grows. Return how many fit. */
static size_t make_room(struct text *text, size_t more) {
  size_t left = text->room > text->length ? text->room - text->length - 1 : 0;
  if (more <= left) return more;
  size_t room = 2 * (text->length + more) + 1024;
  char *characters = text->grows && !text->cut ? realloc(text->characters, room) : NULL;
  text->cut = characters == NULL;
  if (text->cut) return left;
  text->characters = characters;
  text->room = room;
  return more;
}

void text_add_characters(struct text *text, const char *characters, size_t count) {
  size_t fits = make_room(text, count);
  if (fits == 0) return;
  memcpy(text->characters + text->length, characters, fits);
  text->length += fits;
  text->characters[text->length] = '\0';
}

void text_add_arguments(struct text *text, const char *format, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  size_t left = text->room - text->length;
  int length = vsnprintf(text->room > 0 ? text->characters + text->length : NULL, left, format, arguments);
  size_t fits = length > 0 ? make_room(text, (size_t)length) : 0;
  if (fits >= left && fits > 0) vsnprintf(text->characters + text->length, fits + 1, format, again);
  text->length += fits;
  va_end(again);
}

void text_add(struct text *text, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  text_add_arguments(text, format, arguments);
  va_end(arguments);
}
