#include "observe/summary.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "core/abi.h"
#include "core/failure.h"

/* A line of the program, and the calls that it makes. Never freed. */
struct call_site {
  int64_t summary[SUMMARY_WORDS];
  struct call_site *next;
  char text[];
};

enum { BUCKETS = 256, MOST_CALL_SITES = 3 };

static struct call_site *_Atomic sites[BUCKETS];

const struct datatype *array_not_passed(const struct operation *operation, const int64_t attributes[], int64_t *count) {
  const struct datatype *type = NULL;
  for (int i = 0; i < operation->attribute_count; i++) {
    if (operation->attributes[i].kind != KIND_PLAIN) continue;
    if (strcmp(operation->attributes[i].name, "count") == 0) *count = attributes[i];
    if (strcmp(operation->attributes[i].name, "dtype") == 0) type = datatype_find((int)attributes[i]);
  }
  return type;
}

const struct communicator *summary_comm(const int64_t summary[SUMMARY_WORDS]) {
  return object_of(summary[SUMMARY_ATTRIBUTES + operation_table[summary[SUMMARY_ROW]].comm]);
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

void summary_describe(struct text *text, const int64_t summary[SUMMARY_WORDS]) {
  const struct operation *operation = &operation_table[summary[SUMMARY_ROW]];
  const struct datatype *type = datatype_find((int)summary[SUMMARY_TYPE]);
  int64_t elements = summary[SUMMARY_COUNT];
  if (type == NULL) type = array_not_passed(operation, &summary[SUMMARY_ATTRIBUTES], &elements);
  bool outside = operation->row == ROW_outside;
  const struct outside_attributes *outside_words = (const void *)&summary[SUMMARY_ATTRIBUTES];
  text_add(
      text, "%s",
      outside ? (const char *)object_of(outside_words->text) : operation_name(operation, &summary[SUMMARY_ATTRIBUTES]));
  if (type != NULL) text_add(text, " of %" PRId64 " %s", elements, type->name);
  for (int i = 0; i < operation->attribute_count; i++) {
    int64_t value = summary[SUMMARY_ATTRIBUTES + i];
    const char *name = operation->attributes[i].name;
    if (operation->attributes[i].kind == KIND_RANK || operation->attributes[i].kind == KIND_TAG)
      add_number(text, operation->attributes[i].kind, name, value);
    else if (operation->attributes[i].kind == KIND_DERIVATIVE && value != 0)
      text_add(text, " (%s)", derivative_name(value));
    else if (operation->attributes[i].kind == KIND_REDUCTION)
      text_add(text, ", %s %s", name, ((const struct reduction *)object_of(value))->name);
  }
}

static bool may_be_traced(const int64_t summary[SUMMARY_WORDS], int i) {
  if (i < SUMMARY_ATTRIBUTES) return false;
  enum attribute kind = operation_table[summary[SUMMARY_ROW]].attributes[i - SUMMARY_ATTRIBUTES].kind;
  return i - SUMMARY_ATTRIBUTES < operation_table[summary[SUMMARY_ROW]].attribute_count &&
         (kind == KIND_RANK || kind == KIND_TAG);
}

/* Calls in chunks have other counts than their sites, and ranks and tags may be TRACED in a site. So buckets do not
 * depend on them. */
static size_t bucket_of(const int64_t summary[SUMMARY_WORDS]) {
  uint64_t hash = HASH_START;
  for (int i = 0; i < SUMMARY_WORDS; i++)
    if (i != SUMMARY_COUNT && !may_be_traced(summary, i)) hash = hash_add(hash, summary[i]);
  return hash_fold(hash, 32) % BUCKETS;
}

/* Return whether the site makes calls with this summary. */
static bool site_makes(const int64_t *site, const int64_t *summary, bool in_count_too) {
  for (int i = 0; i < SUMMARY_WORDS; i++)
    if (site[i] != summary[i] && (i != SUMMARY_COUNT || in_count_too) &&
        !(may_be_traced(summary, i) && is_traced(site[i])))
      return false;
  return true;
}

bool call_site_add(int row, const int64_t attributes[], int type, int64_t count, const char *text) {
  const struct operation *operation = &operation_table[row];
  int64_t summary[SUMMARY_WORDS] = {[SUMMARY_ROW] = row, [SUMMARY_TYPE] = type, [SUMMARY_COUNT] = count};
  for (int i = 0; i < operation->attribute_count; i++) {
    bool object = attribute_is_object(operation->attributes[i].kind);
    summary[SUMMARY_ATTRIBUTES + i] = object ? (int64_t)(intptr_t)registry_at(attributes[i]) : attributes[i];
  }
  struct call_site *_Atomic *bucket = &sites[bucket_of(summary)];
  for (struct call_site *site = atomic_load(bucket); site != NULL; site = site->next)
    if (site_makes(site->summary, summary, true) && strcmp(site->text, text) == 0) return true;
  struct call_site *site = malloc(sizeof *site + strlen(text) + 1);
  if (site == NULL) return false;
  memcpy(site->summary, summary, sizeof summary);
  memcpy(site->text, text, strlen(text) + 1);
  site->next = atomic_load(bucket); /* the GIL is held: no other thread adds */
  atomic_store(bucket, site);
  return true;
}

void summary_add_call_sites(struct text *text, const char *before, const int64_t summary[SUMMARY_WORDS]) {
  int count = 0;
  int least = summary_comm(summary)->chunk > 0 ? 0 : 1; /* calls in chunks have other counts */
  for (int exact = 1; exact >= least && count == 0; exact--)
    for (struct call_site *site = atomic_load(&sites[bucket_of(summary)]); site != NULL; site = site->next)
      if (site_makes(site->summary, summary, exact) && count++ < MOST_CALL_SITES)
        text_add(text, "%s%s", count == 1 ? before : " or ", site->text);
  int more = count - MOST_CALL_SITES;
  if (more > 0) text_add(text, " or %d more line%s", more, more > 1 ? "s" : "");
}
