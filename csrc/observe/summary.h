/* The summary of a call: what reports and the timeline tell of it, also after the call itself is gone. And the call
 * sites: the lines of the user's program that make such calls.
 *
 * Threads: call_site_add is called under the GIL. Any thread may call the rest; nothing takes a lock.
 */
#ifndef JAXMPI_SUMMARY_H
#define JAXMPI_SUMMARY_H

#include "base/text.h"
#include "core/call.h"

/* A summary is an array of these words; the word of an attribute that is an object is its address. */
enum {
  SUMMARY_ROW,
  SUMMARY_TYPE,
  SUMMARY_COUNT,
  SUMMARY_ATTRIBUTES,
  SUMMARY_WORDS = SUMMARY_ATTRIBUTES + MAX_ATTRIBUTES
};

/* Sets the summary of a call. Returns how many words there are; the others are not set. */
static inline int summarize(const struct call *call, int64_t summary[SUMMARY_WORDS]) {
  const struct buffer *buffer = call->buffers, *end = buffer + call->buffer_count;
  while (buffer < end && (buffer->type == NULL || role_is_of_host(buffer->role))) buffer++;
  summary[SUMMARY_ROW] = call->operation->row;
  summary[SUMMARY_TYPE] = buffer < end ? buffer->type->code : -1;
  summary[SUMMARY_COUNT] = buffer < end ? buffer->count : 0;
  int attributes = call->operation->attribute_count;
  for (int i = 0; i < attributes; i++) summary[SUMMARY_ATTRIBUTES + i] = call->attributes[i];
  return SUMMARY_ATTRIBUTES + attributes;
}

/* The type and the elements of the array that an operation is of, where attributes say so; NULL. */
const struct datatype *array_not_passed(const struct operation *operation, const int64_t attributes[], int64_t *count);

const struct communicator *summary_comm(const int64_t summary[SUMMARY_WORDS]);
const char *comm_name(const struct communicator *comm);

/* Adds a text such as "bcast of 5 float32, root 2". */
void summary_describe(struct text *text, const int64_t summary[SUMMARY_WORDS]);

enum { MOST_CALL_SITES = 3 };

/* The lines of the program that make such calls, MOST_CALL_SITES of them at most, in texts that are never freed.
 * Returns how many there are, which may be more. */
int call_sites_of(const int64_t summary[SUMMARY_WORDS], const char *texts[MOST_CALL_SITES]);

/* Adds these lines, with `before` in front; nothing if none is known. */
void summary_add_call_sites(struct text *text, const char *before, const int64_t summary[SUMMARY_WORDS]);

/* Names a line of the program that makes calls like this one: of this operation, with these attributes (numbers of
 * objects as in programs), of `count` elements of the type with this code, -1 if it has no buffer. */
bool call_site_add(int row, const int64_t attributes[], int type, int64_t count, const char *text);

#endif
