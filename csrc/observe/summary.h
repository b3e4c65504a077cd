/* A call in words: what is told of it in reports and in the timeline, also after the call itself is gone. And the lines
 * of the user's program that make such calls.
 *
 * Threads: words_add_site is called under the GIL. Any thread may call the rest; nothing takes a lock.
 */
#ifndef JAXMPI_SUMMARY_H
#define JAXMPI_SUMMARY_H

#include "core/call.h"

/* Of an attribute that is an object: its address. */
enum { ROW, TYPE, COUNT, FIRST_ATTRIBUTE, WORDS = FIRST_ATTRIBUTE + MAX_ATTRIBUTES };

/* Returns how many words there are; the others are not set. */
static inline int words_of(const struct call *call, int64_t words[WORDS]) {
  const struct buffer *buffer = call->buffers, *end = buffer + call->buffer_count;
  while (buffer < end && (buffer->type == NULL || role_is_of_host(buffer->role))) buffer++;
  words[ROW] = call->operation->row;
  words[TYPE] = buffer < end ? buffer->type->code : -1;
  words[COUNT] = buffer < end ? buffer->count : 0;
  int attributes = call->operation->attribute_count;
  for (int i = 0; i < attributes; i++) words[FIRST_ATTRIBUTE + i] = call->attributes[i];
  return FIRST_ATTRIBUTE + attributes;
}

/* The type and the elements of the array that an operation is of, where attributes say so; NULL. */
const struct datatype *array_not_passed(const struct operation *operation, const int64_t attributes[], int64_t *count);

const struct communicator *words_comm(const int64_t words[WORDS]);
const char *comm_name(const struct communicator *comm);

/* A text that is cut where it gets too long. */
struct text {
  size_t length;
  char characters[2048];
};
__attribute__((format(printf, 2, 3))) void text_add(struct text *text, const char *format, ...);

/* "bcast of 5 float32, root 2" */
void words_tell(struct text *text, const int64_t words[WORDS]);

enum { MOST_SITES = 3 };

/* The lines of the program that make such calls, MOST_SITES of them at most, in texts that are never freed. Returns how
 * many there are, which may be more. */
int words_sites(const int64_t words[WORDS], const char *texts[MOST_SITES]);

/* The same as one text, with `before` in front; nothing if none is known. */
void words_lines(struct text *text, const char *before, const int64_t words[WORDS]);

/* Names a line of the program that makes calls like this one: of this operation, with these attributes (numbers of
 * objects as in programs), of `count` elements of the type with this code, -1 if it has no buffer. */
bool words_add_site(int row, const int64_t attributes[], int type, int64_t count, const char *text);

#endif
