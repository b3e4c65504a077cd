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
 * Compiled for one ABI of MPI, as the core is, with the MPI library to be linked with: tests/mpi/test_injected.py. The
 * functions are those of mpi.def. Threads: any thread may call MPI; `inject` is for a time when none does. */
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

/* From the types of a function's parameters, in parentheses: these with names, and the names. */
#define COUNT9(a, b, c, d, e, f, g, h, i, n, ...) n
#define COUNT(...)                                COUNT9(__VA_ARGS__, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
#define DECLARED1(a)                              __typeof__(a) p1
#define DECLARED2(a, b)                           DECLARED1(a), __typeof__(b) p2
#define DECLARED3(a, b, c)                        DECLARED2(a, b), __typeof__(c) p3
#define DECLARED4(a, b, c, d)                     DECLARED3(a, b, c), __typeof__(d) p4
#define DECLARED5(a, b, c, d, e)                  DECLARED4(a, b, c, d), __typeof__(e) p5
#define DECLARED6(a, b, c, d, e, f)               DECLARED5(a, b, c, d, e), __typeof__(f) p6
#define DECLARED7(a, b, c, d, e, f, g)            DECLARED6(a, b, c, d, e, f), __typeof__(g) p7
#define DECLARED8(a, b, c, d, e, f, g, h)         DECLARED7(a, b, c, d, e, f, g), __typeof__(h) p8
#define DECLARED9(a, b, c, d, e, f, g, h, i)      DECLARED8(a, b, c, d, e, f, g, h), __typeof__(i) p9
#define NAMES1                                    p1
#define NAMES2                                    NAMES1, p2
#define NAMES3                                    NAMES2, p3
#define NAMES4                                    NAMES3, p4
#define NAMES5                                    NAMES4, p5
#define NAMES6                                    NAMES5, p6
#define NAMES7                                    NAMES6, p7
#define NAMES8                                    NAMES7, p8
#define NAMES9                                    NAMES8, p9
#define JOIN2(a, b)                               a##b
#define JOIN(a, b)                                JOIN2(a, b)
#define DECLARED(...)                             JOIN(DECLARED, COUNT(__VA_ARGS__))(__VA_ARGS__)
#define NAMES(...)                                JOIN(NAMES, COUNT(__VA_ARGS__))

#define REQUIRED(name, parameters)                                                 \
  int PMPI_##name parameters;                                                      \
  EXPORT int MPI_##name(DECLARED parameters);                                      \
  EXPORT int MPI_##name(DECLARED parameters) {                                     \
    const struct rule *rule = injected("MPI_" #name, __builtin_return_address(0)); \
    if (rule != NULL && rule->fault == FAIL) return (int)rule->value;              \
    int code = PMPI_##name(NAMES parameters);                                      \
    return rule != NULL ? (int)rule->value : code;                                 \
  }
#define OPTIONAL(name, parameters) /* a library that lacks it must not seem to have it */
#include "mpi/mpi.def"
