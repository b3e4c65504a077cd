/* The summary of a call: what reports and the timeline need of a call, also when the call has ended. And call sites:
 * the lines of the user's program that make calls with a summary.
 *
 * Threads: call_site_add is called under the GIL. Any thread may call the rest; nothing takes a lock.
 */
#ifndef JAXMPI_SUMMARY_H
#define JAXMPI_SUMMARY_H

#include "base/text.h"
#include "core/call.h"

/* A summary is an array of these words. If an attribute is an object, the word is the address. */
enum {
  SUMMARY_ROW,
  SUMMARY_TYPE,
  SUMMARY_COUNT,
  SUMMARY_ATTRIBUTES,
  SUMMARY_WORDS = SUMMARY_ATTRIBUTES + MAX_ATTRIBUTES
};

/* Set the summary of a call. Return how many words there are; the others are not set. */
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

/* Return the type and the count of an operation's array, if attributes contain them; otherwise NULL. */
const struct datatype *array_not_passed(const struct operation *operation, const int64_t attributes[], int64_t *count);

const struct communicator *summary_comm(const int64_t summary[SUMMARY_WORDS]);
const char *comm_name(const struct communicator *comm);

/* Add a text like "bcast of 5 float32, root 2". */
void summary_describe(struct text *text, const int64_t summary[SUMMARY_WORDS]);

/* Add the lines of the program that make calls with this summary, three at most, with `before` in front; nothing if
 * none is known. */
void summary_add_call_sites(struct text *text, const char *before, const int64_t summary[SUMMARY_WORDS]);

/* Name a line of the program that makes calls with this operation and these attributes (numbers of objects as in
 * programs), of `count` elements of the type with this code. -1: the call has no buffer. */
bool call_site_add(int row, const int64_t attributes[], int type, int64_t count, const char *text);

#endif
