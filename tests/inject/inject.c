/* An MPI library whose functions fail, are late or never return: put in front of a real one by LD_PRELOAD.
 *
 * Rules separated by blanks say so, FUNCTION:CALL:FAULT or, for one rank of COMM_WORLD alone, FUNCTION:CALL:FAULT@RANK.
 * CALL counts the calls of the function by jaxmpi's core in this process, from 1; other calls pass unchanged. FAULT:
 *
 *   fail=CODE       returns the MPI error code, and the library is not called;
 *   fail-after=CODE the same, once the library has done what was asked for;
 *   delay=SECONDS   the library is called later;
 *   hang            never returns.
 *
 * JAXMPI_INJECT has the rules as a process begins. `inject` replaces them, and the counts begin anew.
 *
 * Compiled for one ABI of MPI, as the core is, with the MPI library to be linked with: tests/mpi/test_injected.py,
 * which writes functions.def, those that mpi.def requires: a library that lacks an optional one must not seem to have
 * it. Threads: any thread may call MPI; `inject` is for a time when none does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "mpi/mpi_table.h"

#define EXPORT __attribute__((visibility("default")))

enum fault { NONE, FAIL, FAIL_AFTER, DELAY, HANG };

struct rule {
  char function[48];
  long call;
  enum fault fault;
  double value; /* the code, or the seconds */
  atomic_long calls;
};

enum { RULES = 16 };
static struct rule rules[RULES];
static int rule_count;

/* The rank in COMM_WORLD, by the launchers of Open MPI and of MPICH; 0 without one. */
static long rank_here(void) {
  const char *rank = getenv("OMPI_COMM_WORLD_RANK");
  if (rank == NULL) rank = getenv("PMI_RANK");
  return rank != NULL ? strtol(rank, NULL, 10) : 0;
}

/* False: the text is no rule. */
static bool read_rule(const char *text, struct rule *rule, long *rank) {
  static const char *const names[] = {
      [FAIL] = "fail=", [FAIL_AFTER] = "fail-after=", [DELAY] = "delay=", [HANG] = "hang"};
  int length = 0;
  if (sscanf(text, "%47[^:]:%ld:%n", rule->function, &rule->call, &length) != 2 || length == 0) return false;
  text += length;
  for (rule->fault = HANG; rule->fault != NONE; rule->fault--)
    if (strncmp(text, names[rule->fault], strlen(names[rule->fault])) == 0) break;
  if (rule->fault == NONE) return false;
  char *end = (char *)(uintptr_t)text + strlen(names[rule->fault]);
  if (rule->fault != HANG) rule->value = strtod(end, &end);
  *rank = *end == '@' ? strtol(end + 1, &end, 10) : rank_here();
  return *end == '\0';
}

EXPORT void inject(const char *text);
EXPORT void inject(const char *text) {
  char *copy = strdup(text), *rest = copy, *word;
  rule_count = 0;
  while ((word = strsep(&rest, " ")) != NULL) {
    long rank;
    if (*word == '\0') continue;
    struct rule *rule = &rules[rule_count];
    if (rule_count == RULES - 1 || !read_rule(word, rule, &rank)) {
      fprintf(stderr, "inject: '%s' is no rule, or one too many\n", word);
      abort();
    }
    atomic_store(&rule->calls, 0);
    rule_count += rank == rank_here();
  }
  free(copy);
}

__attribute__((constructor)) static void begin(void) {
  const char *text = getenv("JAXMPI_INJECT");
  if (text != NULL) inject(text);
}

static bool is_core(void *caller) {
  Dl_info info;
  return dladdr(caller, &info) != 0 && info.dli_fname != NULL && strstr(info.dli_fname, "_core.") != NULL;
}

/* Called before the library: delays, hangs, or returns the rule of a failure. */
static const struct rule *injected(const char *function, void *caller) {
  const struct rule *found = NULL;
  for (struct rule *rule = rules; rule < rules + rule_count; rule++) {
    if (strcmp(rule->function, function) != 0 || !is_core(caller)) continue;
    if (atomic_fetch_add(&rule->calls, 1) + 1 != rule->call) continue;
    if (rule->fault == DELAY) usleep((useconds_t)(1e6 * rule->value));
    while (rule->fault == HANG) pause();
    if (rule->fault == FAIL || rule->fault == FAIL_AFTER) found = rule;
  }
  return found;
}

/* The types of the parameters, these with names, and the names. */
#define FUNCTION(name, types, declared, names)                                     \
  int PMPI_##name types;                                                           \
  EXPORT int MPI_##name declared;                                                  \
  EXPORT int MPI_##name declared {                                                 \
    const struct rule *rule = injected("MPI_" #name, __builtin_return_address(0)); \
    if (rule != NULL && rule->fault == FAIL) return (int)rule->value;              \
    int code = PMPI_##name names;                                                  \
    return rule != NULL ? (int)rule->value : code;                                 \
  }
#include "functions.def"
