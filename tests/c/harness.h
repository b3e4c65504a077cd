/* Shared by the C tests: checks that count failures, call frames, and the fake MPI library under the core.
 *
 * A program runs its functions TEST in the order of their lines; its arguments are the fake library (none: a program
 * without MPI) and the name of one test. Each test starts with an empty record of calls; after it no MPI object may be
 * left: no derived types, requests, matched or unread messages.
 */
#ifndef JAXMPI_HARNESS_H
#define JAXMPI_HARNESS_H

#include <pthread.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/memory.h"
#include "core/abi.h"
#include "devices/spaces.h"
#include "fake_mpi.h"

/* Failures are printed and counted; the test goes on. */
#define CHECK(condition)                 check(condition, #condition, __FILE__, __LINE__)
#define CHECK_EQUAL(left, right)         check_equal((int64_t)(left), (int64_t)(right), #left, #right, __FILE__, __LINE__)
#define CHECK_SAME(a, b, bytes)          check_same(a, b, (size_t)(bytes), #a " == " #b, __FILE__, __LINE__)
#define SUCCEEDS(call)                   check_success(call, #call, __FILE__, __LINE__)
#define FAILS(call, code, ...)           check_failure(call, code, (const char *const[]){__VA_ARGS__, NULL}, __FILE__, __LINE__)
#define FAILS_IF(wrong, call, code, ...) (void)((wrong) ? FAILS(call, code, __VA_ARGS__) : SUCCEEDS(call))
#define FOR_EACH(type, item, list)       for (type item = (list); item < (list) + sizeof(list) / sizeof *(list); item++)
#define FOR_VALUES(type, item, ...)                                       \
  for (const type item##_values[] = {__VA_ARGS__}, *item = item##_values; \
       item < item##_values + sizeof item##_values / sizeof *item; item++)
typedef const char *string; /* as a type for FOR_VALUES */

bool check(bool condition, const char *text, const char *file, int line);
bool check_equal(int64_t left, int64_t right, const char *left_text, const char *right_text, const char *file,
                 int line);
bool check_same(const void *a, const void *b, size_t bytes, const char *text, const char *file, int line);
bool check_success(ffi_error *error, const char *text, const char *file, int line);
bool check_failure(ffi_error *error, int code, const char *const texts[], const char *file, int line);

/* A text, by printf, that is printed with each failure until the next call of this function. */
__attribute__((format(printf, 1, 2))) void context(const char *format, ...);

/* The error that a handler returns in these tests; freed by error_free. */
struct ffi_error {
  int code;
  char text[];
};
void error_free(ffi_error *error);
int live_errors(void);

/* XLA's numbers for some types. */
enum { BOOL = 1, S16 = 3, S32 = 4, U8 = 6, F16 = 10, F32 = 11, F64 = 12, BF16 = 16, C128 = 18 };

/* A buffer to pass; rank -1: none. */
struct array {
  int dtype;
  void *data;
  int rank;
  int64_t dims[3];
};
#define ARRAY(dtype, data, n)     ((struct array){dtype, data, 1, {n}})
#define MATRIX(dtype, data, m, n) ((struct array){dtype, data, 2, {m, n}})
#define SCALAR(dtype, data)       ((struct array){dtype, data, 0, {0}})
#define NONE                      ((struct array){0, NULL, -1, {0}})

/* Operands or results of a frame, and the token after them. */
enum { MAX_ARRAYS = 300 };
struct arrays {
  ffi_buffer buffers[MAX_ARRAYS + 1];
  void *pointers[MAX_ARRAYS + 1];
  int types[MAX_ARRAYS + 1];
  int64_t dims[MAX_ARRAYS][3];
};

/* A frame as XLA makes it for a function with one ordered effect: a token follows the buffers on each side. */
struct frame {
  ffi_frame frame;
  struct arrays operands, results;
  int attribute_types[MAX_ATTRIBUTES];
  ffi_span spans[MAX_ATTRIBUTES], *names[MAX_ATTRIBUTES];
  ffi_scalar scalars[MAX_ATTRIBUTES];
  void *values[MAX_ATTRIBUTES];
  int64_t attributes[MAX_ATTRIBUTES];
};

/* Fills `frame` for an operation. The attributes are in the order of ops.def, without DERIVATIVE, ADJOINT and LEAF,
 * which are taken from the variables `derivative`, `leaf` and `function`: 0 at the start of each test. */
extern int64_t derivative, leaf, function;
void frame_make(struct frame *frame, const char *operation, struct array in, struct array out,
                const int64_t attributes[]);
ffi_error *frame_call(struct frame *frame, const char *operation);

/* Which execution of a program frames are of, for ffi_run; 0, as it is unless a test sets it: not known. */
extern int64_t run_number;

/* The same for any number of arrays. */
void frame_make_lists(struct frame *frame, const char *operation, const struct array in[], int in_count,
                      const struct array out[], int out_count, const int64_t attributes[]);

/* The same, by the handler for buffers in another memory; the frame's stream is `xla_stream`. */
ffi_error *frame_call_in(const struct memory *memory, struct frame *frame, const char *operation);
extern void *xla_stream;

/* frame_make_lists and frame_call. */
ffi_error *run_lists(const char *operation, const struct array in[], int in_count, const struct array out[],
                     int out_count, const int64_t attributes[]);

/* The same for one array; first as a program is made, then as it runs. */
ffi_error *run(const char *operation, struct array in, struct array out, const int64_t attributes[]);
#define RUN(operation, in, out, ...) run(operation, in, out, (const int64_t[]){__VA_ARGS__})
#define COMM(pointer)                registered(pointer)

/* Each operation without a request as rank 1 of 3 may call it: the barrier, the other collectives, messages. */
enum { USUALS = 16, USUAL_COLLECTIVES = 13 };
extern const struct usual {
  const char *operation, *function; /* of MPI, whose calls count */
  int in, out;                      /* shares of a rank in the operand and in the result; 0: there is none */
  int64_t attributes[5];            /* behind the communicator */
  const char *given, *compared;     /* what an error says of the attributes, and a comparison of the call */
} usuals[USUALS];
void usual_attributes(const struct usual *usual, void *status, int64_t attributes[6]);
ffi_error *run_usual(const struct usual *usual, int dtype, void *in, void *out, int64_t share, void *status);
bool is_usual(const struct usual *usual, const char *operation);
bool reduces(const struct usual *usual); /* in chunks */

/* The fake library, the copy of the core for it, and its handles. */
extern struct fake_control *fake;
extern void *fake_library;
extern const struct abi *abi;
intptr_t datatype(int dtype); /* the MPI handle for a type of XLA */
intptr_t operation_handle(const char *name);

/* The number of an object in the registry, to which it is added if it is not there; 0 for NULL. */
int64_t registered(const void *object);

/* The number of a reduction: of MPI's by name, or of any by handle. */
int64_t reduction(const char *name);
int64_t reduction_of(intptr_t handle, enum reducer by);

/* A communicator in which this process is `rank` of `size`; the same one for the same numbers. */
struct communicator *world(int rank, int size);

/* The nth call (from 0) of an MPI function since the last reset; if there is none, a call with an empty name. */
const struct fake_call *called(const char *function, int nth);
int times_called(const char *function);
void check_envelope(const struct fake_call *call, int peer, int tag);
/* Calls that reached another rank: all except queries and constructors of types. */
int communications(void);

/* From now on until the end of the test calls on this communicator are compared: all of them, or the next `calls`. The
 * other ranks tell what this one does, as changed by `others`, of a `record` and of nothing else, if it is not NULL. */
void compare_on(struct communicator *comm, int64_t calls, void (*others)(int rank, void *record));
/* Others that do not come, those that have gone on without an answer, and those that compare no more; off again with
 * HERE. */
enum absence { HERE, LATE_RANKS, LEFT_RANKS, STOPPED_RANKS };
extern enum absence absence;
/* What this rank has asked, and what it has told others since compare_on. */
extern int questions, tellings;

/* Buffers: `fill` writes bytes that differ, `blank` 0xee; is_blank and is_zero test the bytes [from, to),
 * is_spoilt whether those before `to` are 0xff. */
void fill(void *data, size_t bytes);
void blank(void *data, size_t bytes);
bool is_blank(const void *data, size_t from, size_t to);
bool is_zero(const void *data, size_t from, size_t to);
bool is_spoilt(const void *data, size_t to);

/* Between the two what goes to stderr goes to `caught`, which is the context of failures from then on. */
extern char caught[8192];
void catch_stderr(void);
void release_stderr(void);

/* Whether a text is like an extended regular expression; `flags` of regcomp. */
bool is_like(const char *text, const char *pattern, int flags, regmatch_t groups[3]);

/* Random numbers below `below`, by xorshift64*: the same in each run, from the state that a test sets. */
extern uint64_t draw_state;
uint32_t draw(uint32_t below);
bool once_in(uint32_t n);

/* A list of numbers, such as those of a plan, put together piece by piece. */
struct numbers {
  int64_t values[2048];
  size_t count;
};
#define PUT(numbers, ...) put(numbers, (const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / 8)
void put(struct numbers *numbers, const int64_t *values, size_t count);

struct test {
  const char *name;
  void (*run)(void);
  int line;
  struct test *next;
};
void test_add(struct test *test);
#define TEST_AT(line, name)                                   \
  static void name(void);                                     \
  __attribute__((constructor)) static void add_##name(void) { \
    static struct test test = {#name, name, line, NULL};      \
    test_add(&test);                                          \
  }                                                           \
  static void name(void)
#define TEST(name)       TEST_AT(__LINE__, name)
#define TEST_FIRST(name) TEST_AT(0, name)

/* A program may have these: before each test, and after it. */
void prepare(void);
void check_after(void);

/* Tests that a function runs in several ways. The other macro: for all places in communicators, types and counts of one
 * rank's share, by for_all or by a function that calls it. */
struct share {
  const struct communicator *comm;
  int rank, size, dtype, count;
  size_t bytes; /* of `count` elements */
};
void for_all(void (*body)(const struct share *));
#define TEST_THROUGH(runner, name, parameter) \
  static void name##_body(parameter);         \
  TEST(name) { runner(name##_body); }         \
  static void name##_body(parameter)
#define TEST_OF(runner, name) TEST_THROUGH(runner, name, const struct share *s)

/* Runs the tests on the fake library argv[1]. Returns the exit status. */
int run_tests(int argc, char **argv);

#endif
