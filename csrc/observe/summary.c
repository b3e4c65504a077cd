#include "observe/summary.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/abi.h"
#include "core/failure.h"

/* A line of the program, and the calls that it makes. Never freed. */
struct site {
  int64_t words[WORDS];
  struct site *next;
  char text[];
};

enum { BUCKETS = 256 };

static struct site *_Atomic sites[BUCKETS];

void text_add(struct text *text, const char *format, ...) {
  va_list arguments;
  size_t room = sizeof text->characters - text->length;
  va_start(arguments, format);
  int length = vsnprintf(text->characters + text->length, room, format, arguments);
  va_end(arguments);
  if (length > 0) text->length += (size_t)length < room ? (size_t)length : room - 1;
}

const struct datatype *array_not_passed(const struct operation *operation, const int64_t attributes[], int64_t *count) {
  const struct datatype *type = NULL;
  for (int i = 0; i < operation->attribute_count; i++) {
    if (operation->attributes[i].kind != KIND_PLAIN) continue;
    if (strcmp(operation->attributes[i].name, "count") == 0) *count = attributes[i];
    if (strcmp(operation->attributes[i].name, "dtype") == 0) type = datatype_find((int)attributes[i]);
  }
  return type;
}

const struct communicator *words_comm(const int64_t words[WORDS]) {
  return object_of(words[FIRST_ATTRIBUTE + operation_table[words[ROW]].comm]);
}

const char *comm_name(const struct communicator *comm) {
  const char *name = atomic_load(&comm->name);
  return name != NULL ? name : "a communicator";
}

static void add_number(struct text *text, enum attribute kind, const char *name, int64_t number) {
  const struct abi *abi = runtime.abi;
  if (kind == KIND_RANK && number == abi->any_source)
    text_add(text, ", %s any rank", name);
  else if (kind == KIND_TAG && number == abi->any_tag)
    text_add(text, ", any %s", name);
  else
    text_add(text, ", %s %" PRId64, name, number);
}

void words_tell(struct text *text, const int64_t words[WORDS]) {
  const struct operation *operation = &operation_table[words[ROW]];
  const struct datatype *type = words[TYPE] >= 0 ? datatype_find((int)words[TYPE]) : NULL;
  int64_t elements = words[COUNT];
  if (type == NULL) type = array_not_passed(operation, &words[FIRST_ATTRIBUTE], &elements);
  text_add(text, "%s", operation->name);
  if (type != NULL) text_add(text, " of %" PRId64 " %s", elements, type->name);
  for (int i = 0; i < operation->attribute_count; i++) {
    int64_t value = words[FIRST_ATTRIBUTE + i];
    const char *name = operation->attributes[i].name;
    if (operation->attributes[i].kind == KIND_RANK || operation->attributes[i].kind == KIND_TAG)
      add_number(text, operation->attributes[i].kind, name, value);
    else if (operation->attributes[i].kind == KIND_DERIVATIVE && value != 0)
      text_add(text, " (%s)", derivative_name(value));
    else if (operation->attributes[i].kind == KIND_REDUCTION)
      text_add(text, ", %s %s", name, ((const struct reduction *)object_of(value))->name);
  }
}

static bool may_be_traced(const int64_t words[WORDS], int i) {
  if (i < FIRST_ATTRIBUTE) return false;
  enum attribute kind = operation_table[words[ROW]].attributes[i - FIRST_ATTRIBUTE].kind;
  return i - FIRST_ATTRIBUTE < operation_table[words[ROW]].attribute_count && (kind == KIND_RANK || kind == KIND_TAG);
}

/* Calls in chunks have other counts than their sites, and ranks and tags may be TRACED there; so these are found
 * without them. */
static unsigned bucket_of(const int64_t words[WORDS]) {
  uint64_t hash = 0;
  for (int i = 0; i < WORDS; i++)
    if (i != COUNT && !may_be_traced(words, i))
      hash = (hash ^ (uint64_t)words[i]) * UINT64_C(0x9e3779b97f4a7c15), hash ^= hash >> 29;
  return (unsigned)(hash % BUCKETS);
}

/* Whether the site makes such calls. */
static bool alike(const int64_t *site, const int64_t *words, bool in_count_too) {
  for (int i = 0; i < WORDS; i++)
    if (site[i] != words[i] && (i != COUNT || in_count_too) && !(may_be_traced(words, i) && is_traced(site[i])))
      return false;
  return true;
}

bool words_add_site(int row, const int64_t attributes[], int type, int64_t count, const char *text) {
  const struct operation *operation = &operation_table[row];
  int64_t words[WORDS] = {[ROW] = row, [TYPE] = type, [COUNT] = count};
  for (int i = 0; i < operation->attribute_count; i++) {
    bool object = attribute_is_object(operation->attributes[i].kind);
    words[FIRST_ATTRIBUTE + i] = object ? (int64_t)(intptr_t)registry_at(attributes[i]) : attributes[i];
  }
  struct site *_Atomic *bucket = &sites[bucket_of(words)];
  for (struct site *site = atomic_load(bucket); site != NULL; site = site->next)
    if (alike(site->words, words, true) && strcmp(site->text, text) == 0) return true;
  struct site *made = malloc(sizeof *made + strlen(text) + 1);
  if (made == NULL) return false;
  memcpy(made->words, words, sizeof words);
  memcpy(made->text, text, strlen(text) + 1);
  made->next = atomic_load(bucket); /* the GIL is held: nobody else adds */
  atomic_store(bucket, made);
  return true;
}

int words_sites(const int64_t words[WORDS], const char *texts[MOST_SITES]) {
  int found = 0;
  int least = words_comm(words)->chunk > 0 ? 0 : 1; /* calls in chunks have other counts */
  for (int exact = 1; exact >= least && found == 0; exact--)
    for (struct site *site = atomic_load(&sites[bucket_of(words)]); site != NULL; site = site->next)
      if (alike(site->words, words, exact) && found++ < MOST_SITES) texts[found - 1] = site->text;
  return found;
}

void words_lines(struct text *text, const char *before, const int64_t words[WORDS]) {
  const char *texts[MOST_SITES];
  int found = words_sites(words, texts), more = found - MOST_SITES;
  for (int i = 0; i < found && i < MOST_SITES; i++) text_add(text, "%s%s", i == 0 ? before : " or ", texts[i]);
  if (more > 0) text_add(text, " or %d more line%s", more, more > 1 ? "s" : "");
}
