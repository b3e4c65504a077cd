#define _GNU_SOURCE
#include "harness.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>

#include "execute/agreement.h"
#include "observe/watchdog.h"
#include "requests/table.h"

struct fake_control *fake;
void *fake_library;
const struct abi *abi;

/* --- checks --- */

static int failures;
static char where[256];

__attribute__((format(printf, 3, 4))) static bool complain(const char *file, int line, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  printf("%s:%d: ", file, line);
  vprintf(format, arguments);
  printf("%s%s\n", where[0] != '\0' ? "  with " : "", where);
  va_end(arguments);
  failures++;
  return false;
}

void context(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(where, sizeof where, format, arguments);
  va_end(arguments);
}

bool check(bool condition, const char *text, const char *file, int line) {
  return condition || complain(file, line, "%s", text);
}

bool check_equal(int64_t left, int64_t right, const char *left_text, const char *right_text, const char *file,
                 int line) {
  return left == right ||
         complain(file, line, "%s == %s: %" PRId64 ", not %" PRId64, left_text, right_text, left, right);
}

bool check_same(const void *a, const void *b, size_t bytes, const char *text, const char *file, int line) {
  for (size_t i = 0; i < bytes; i++)
    if (((const unsigned char *)a)[i] != ((const unsigned char *)b)[i])
      return complain(file, line, "%s: byte %zu of %zu is %d, not %d", text, i, bytes, ((const unsigned char *)a)[i],
                      ((const unsigned char *)b)[i]);
  return true;
}

bool check_success(ffi_error *error, const char *text, const char *file, int line) {
  if (error == NULL) return true;
  complain(file, line, "%s: %s", text, error->text);
  error_free(error);
  return false;
}

bool check_failure(ffi_error *error, int code, const char *const texts[], const char *file, int line) {
  if (error == NULL) return complain(file, line, "no error where one is due");
  bool good = error->code == code || complain(file, line, "code %d, not %d: %s", error->code, code, error->text);
  for (; *texts != NULL; texts++)
    if (strstr(error->text, *texts) == NULL) good = complain(file, line, "no '%s' in: %s", *texts, error->text);
  error_free(error);
  return good;
}

/* --- frames --- */

static int errors;

void error_free(ffi_error *error) {
  free(error);
  errors--;
}

int live_errors(void) { return errors; }

static ffi_error *error_create(ffi_error_create_args *args) {
  ffi_error *error = malloc(sizeof *error + strlen(args->message) + 1);
  CHECK(args->struct_size == sizeof *args && args->extension == NULL);
  if (error == NULL) abort();
  error->code = (int)args->code;
  memcpy(error->text, args->message, strlen(args->message) + 1);
  errors++;
  return error;
}

void *xla_stream;
static ffi_error *stream_get(ffi_stream_get_args *args) {
  CHECK(args->struct_size == sizeof *args && args->extension == NULL);
  args->stream = xla_stream;
  return NULL;
}

static void error_destroy(ffi_error_destroy_args *args) {
  CHECK(args->struct_size == sizeof *args && args->extension == NULL);
  error_free(args->error);
}

int64_t run_number;
static ffi_error *run_get(ffi_run_args *args) {
  CHECK(args->struct_size == sizeof *args && args->extension == NULL);
  args->run = run_number;
  return NULL;
}

static const ffi_api api = {.struct_size = sizeof api,
                            .error_create = error_create,
                            .error_destroy = error_destroy,
                            .stream_get = stream_get,
                            .run_get = run_get};

/* A list of buffers and a token. */
static void list_make(ffi_buffers *list, struct arrays *arrays, const struct array given[], int count) {
  *list = (ffi_buffers){
      .struct_size = sizeof *list, .size = count + 1, .types = arrays->types, .buffers = arrays->pointers};
  for (int i = 0; i <= count; i++) {
    arrays->types[i] = 1; /* a buffer */
    arrays->pointers[i] = &arrays->buffers[i];
    arrays->buffers[i] = (ffi_buffer){sizeof(ffi_buffer), NULL, FFI_DTYPE_TOKEN, NULL, 0, NULL};
    if (i == count) return;
    memcpy(arrays->dims[i], given[i].dims, sizeof given[i].dims);
    arrays->buffers[i] =
        (ffi_buffer){sizeof(ffi_buffer), NULL, given[i].dtype, given[i].data, given[i].rank, arrays->dims[i]};
  }
}

int64_t derivative, leaf, function;

static int row_of(const char *operation) {
  for (int i = 0; operation_table[i].id != NULL; i++)
    if (strcmp(operation_table[i].id, operation) == 0) return i;
  printf("no operation '%s'\n", operation);
  exit(1);
}

void frame_make(struct frame *f, const char *operation, struct array in, struct array out, const int64_t attributes[]) {
  frame_make_lists(f, operation, &in, in.rank >= 0, &out, out.rank >= 0, attributes);
}

void frame_make_lists(struct frame *f, const char *operation, const struct array in[], int in_count,
                      const struct array out[], int out_count, const int64_t attributes[]) {
  const struct operation *row = &operation_table[row_of(operation)];
  *f = (struct frame){.frame = {.struct_size = sizeof f->frame, .api = &api, .stage = FFI_STAGE_EXECUTE}};
  list_make(&f->frame.operands, &f->operands, in, in_count);
  list_make(&f->frame.results, &f->results, out, out_count);
  for (int i = 0, next = 0; i < row->attribute_count; i++) {
    enum attribute kind = row->attributes[i].kind;
    f->attributes[i] = kind == KIND_DERIVATIVE ? derivative
                       : kind == KIND_ADJOINT  ? derivative >= DERIVATIVE_COTANGENT
                       : kind == KIND_LEAF     ? leaf
                       : kind == KIND_FUNCTION ? function
                                               : attributes[next++];
    f->spans[i] = (ffi_span){row->attributes[i].name, strlen(row->attributes[i].name)};
    f->names[i] = &f->spans[i];
    f->scalars[i] = (ffi_scalar){FFI_DTYPE_S64, &f->attributes[i]};
    f->values[i] = &f->scalars[i];
    f->attribute_types[i] = FFI_ATTRIBUTE_SCALAR;
  }
  f->frame.attributes = (ffi_attributes){.struct_size = sizeof(ffi_attributes),
                                         .size = row->attribute_count,
                                         .types = f->attribute_types,
                                         .names = f->names,
                                         .values = f->values};
}

ffi_error *frame_call(struct frame *frame, const char *operation) {
  return frame_call_in(&memory_host, frame, operation);
}

ffi_error *frame_call_in(const struct memory *memory, struct frame *frame, const char *operation) {
  return memory->handlers[row_of(operation)](&frame->frame);
}

ffi_error *run_lists(const char *operation, const struct array in[], int in_count, const struct array out[],
                     int out_count, const int64_t attributes[]) {
  struct frame frame;
  frame_make_lists(&frame, operation, in, in_count, out, out_count, attributes);
  return frame_call(&frame, operation);
}

ffi_error *run(const char *operation, struct array in, struct array out, const int64_t attributes[]) {
  struct frame frame;
  frame_make(&frame, operation, in, out, attributes);
  frame.frame.stage = FFI_STAGE_INSTANTIATE; /* as XLA does it: once for a program, then each call */
  ffi_error *error = frame_call(&frame, operation);
  if (error != NULL) return error;
  frame.frame.stage = FFI_STAGE_EXECUTE;
  return frame_call(&frame, operation);
}

/* --- MPI --- */

intptr_t datatype(int dtype) {
  size_t bytes;
  return fake->datatype(datatype_find(dtype)->mpi, &bytes);
}

intptr_t operation_handle(const char *name) { return fake->operation(name); }

/* A place without its key, as the core tells it where there are no meanings. */
enum { KEY = 0x1234567, PLACES = 2048 };

int64_t registered(const void *object) {
  for (int64_t place = 1; object != NULL && place < PLACES; place++)
    if (registry_at((int64_t)KEY << PLACE_BITS | place) == object) return (int64_t)KEY << PLACE_BITS | place;
  return object == NULL ? 0 : registry_add((void *)(uintptr_t)object, NULL);
}

static int64_t reduction_find(intptr_t handle, enum reducer by, const char *name) {
  static struct reduction *made[64];
  size_t i = 0;
  for (; made[i] != NULL; i++)
    if (made[i]->handle == handle && made[i]->by == by) return made[i]->number;
  made[i] = reduction_add(handle, by, name);
  return made[i]->number;
}

int64_t reduction(const char *name) { return reduction_find(operation_handle(name), REDUCER_MPI, name); }

int64_t reduction_of(intptr_t handle, enum reducer by) { return reduction_find(handle, by, "another"); }

struct communicator *world(int rank, int size) {
  static struct communicator *made[8][18]; /* ranks below 8, sizes below 18 */
  struct communicator **found = &made[rank][size];
  int calls = fake->call_count;
  if (*found != NULL) return *found;
  CHECK_EQUAL(abi->communicator(fake->comm_new(rank, size), NULL, found), 0);
  fake->call_count = calls; /* a test counts its own */
  return *found;
}

enum { THE_SUM = -99, THE_STATUS };
const struct usual usuals[USUALS] = {
    {"barrier", "MPI_Barrier", 0, 0, {0}, "", ""},
    {"allgather", "MPI_Allgather", 1, 3, {0}, "", ""},
    {"allreduce", "MPI_Allreduce", 1, 1, {THE_SUM}, "", " SUM"},
    {"alltoall", "MPI_Alltoall", 3, 3, {0}, "", ""},
    {"bcast", "MPI_Bcast", 1, 0, {1}, "; root 1", " from root 1"},
    {"bcast", "MPI_Bcast", 0, 1, {2}, "; root 2", " from root 2"},
    {"gather", "MPI_Gather", 1, 3, {1}, "; root 1", " to root 1"},
    {"gather", "MPI_Gather", 1, 0, {2}, "; root 2", " to root 2"},
    {"reduce", "MPI_Reduce", 1, 1, {THE_SUM, 1}, "; root 1", " SUM to root 1"},
    {"reduce", "MPI_Reduce", 1, 0, {THE_SUM, 2}, "; root 2", " SUM to root 2"},
    {"scan", "MPI_Scan", 1, 1, {THE_SUM}, "", " SUM"},
    {"scatter", "MPI_Scatter", 3, 1, {1}, "; root 1", " from root 1"},
    {"scatter", "MPI_Scatter", 0, 1, {2}, "; root 2", " from root 2"},
    {"send", "MPI_Send", 1, 0, {2, 9}, "; dest 2; tag 9", NULL},
    {"recv", "MPI_Mrecv", 0, 1, {2, THE_STATUS, 9}, "; source 2; tag 9", NULL},
    {"sendrecv", "MPI_Isend", 1, 1, {0, 9, 5, 2, THE_STATUS}, "; dest 0; recvtag 9; sendtag 5; source 2", NULL},
};

bool is_usual(const struct usual *usual, const char *operation) { return strcmp(usual->operation, operation) == 0; }

bool reduces(const struct usual *usual) { return usual->attributes[0] == THE_SUM; }

void usual_attributes(const struct usual *usual, void *status, int64_t attributes[6]) {
  attributes[0] = COMM(world(1, 3));
  for (int i = 0; i < 5; i++) {
    int64_t value = usual->attributes[i];
    attributes[i + 1] = value == THE_SUM ? reduction("SUM") : value == THE_STATUS ? COMM(status) : value;
  }
}

ffi_error *run_usual(const struct usual *usual, int dtype, void *in, void *out, int64_t share, void *status) {
  int64_t attributes[6];
  struct array arrays[] = {NONE, NONE};
  usual_attributes(usual, status, attributes);
  if (usual->in > 0) arrays[0] = usual->in == 1 ? ARRAY(dtype, in, share) : MATRIX(dtype, in, 3, share);
  if (usual->out > 0) arrays[1] = usual->out == 1 ? ARRAY(dtype, out, share) : MATRIX(dtype, out, 3, share);
  return run(usual->operation, arrays[0], arrays[1], attributes);
}

/* --- comparisons, in which the other ranks are played by what follows --- */

enum { ROUND_BYTES = 5 * 8, MOST_POSTED = 256 };
enum absence absence;
int questions, tellings;
static struct abi comparing;
static void (*others_do)(int rank, void *record);
static struct communicator *compared[8];
static struct posted {
  void *data;
  size_t bytes;
  int rank, tag;
} receives[MOST_POSTED];
static struct {
  int64_t round[5];
  char telling[1024];
} last;

static int post_to_others(void *data, size_t bytes, bool sends, int rank, int tag, intptr_t *request) {
  *request = 0;
  if (sends && bytes == ROUND_BYTES) {
    int64_t before = last.round[1];
    memcpy(last.round, data, bytes);
    questions += last.round[1] != before;
  } else if (sends) {
    memcpy(last.telling, data, bytes);
    tellings++;
  }
  while (!sends && receives[*request].data != NULL) ++*request;
  if (!sends) receives[*request] = (struct posted){data, bytes, rank, tag};
  *request = sends ? -1 : *request;
  return 0;
}

/* What comes from a rank is what this one has sent last. */
static int test_of_others(intptr_t *request, bool *done) {
  *done = *request < 0 || absence != LATE_RANKS;
  if (*request < 0 || !*done) return 0;
  struct posted *receive = &receives[*request];
  int64_t *round = receive->data;
  memcpy(receive->data, receive->bytes == ROUND_BYTES ? (void *)last.round : last.telling, receive->bytes);
  if (receive->bytes == ROUND_BYTES) {
    round[2] = absence == LEFT_RANKS ? 1 : absence == STOPPED_RANKS ? 2 : round[2];
    char record[256];
    memset(record, 0, sizeof record);
    if (others_do != NULL) others_do(receive->rank, record);
    for (size_t i = 0; i < sizeof record; i++)
      if (record[i] != 0) round[3] = INT64_MIN + 1;
  } else if (others_do != NULL) {
    others_do(receive->rank, receive->data);
  }
  receive->data = NULL;
  return 0;
}

static int cancel_of_others(intptr_t *request) {
  if (*request >= 0) receives[*request].data = NULL;
  return 0;
}

void compare_on(struct communicator *comm, int64_t calls, void (*others)(int rank, void *record)) {
  int ranks[8] = {0, 1, 2, 3, 4, 5, 6, 7}, place = 0;
  if (atomic_load(&comm->agreement) != NULL) agreement_end(comm);
  agreement_prepare(comm, comm->number, ranks); /* a new one: nothing of an earlier test is left */
  comparing = *abi;
  comparing.post = post_to_others, comparing.test = test_of_others, comparing.cancel = cancel_of_others;
  runtime.abi = &comparing;
  runtime.channel = 1;
  if (runtime.most_tag == 0) runtime.most_tag = INT32_MAX;
  atomic_store(&runtime.check, calls == INT64_MAX);
  atomic_store(&comm->to_compare, calls);
  comm->in_vain = 0;
  others_do = others;
  absence = HERE;
  memset(&last, 0, sizeof last);
  questions = tellings = 0;
  while (place < 7 && compared[place] != NULL && compared[place] != comm) place++;
  compared[place] = comm;
}

static void compare_off(void) {
  for (size_t i = 0; i < sizeof compared / sizeof *compared; i++)
    if (compared[i] != NULL) atomic_store(&compared[i]->to_compare, 0);
  atomic_store(&runtime.check, false);
  runtime.abi = abi;
}

const struct fake_call *called(const char *function, int nth) {
  static const struct fake_call none = {.name = ""};
  for (int i = 0; i < fake->call_count && i < FAKE_CALLS; i++) {
    const char *name = fake->calls[i].name;
    if (name != NULL && strcmp(name, function) == 0 && nth-- == 0) return &fake->calls[i];
  }
  return &none;
}

int times_called(const char *function) {
  int count = 0;
  while (called(function, count)->name[0] != '\0') count++;
  return count;
}

void check_envelope(const struct fake_call *call, int peer, int tag) {
  CHECK_EQUAL(call->peer, peer);
  CHECK_EQUAL(call->tag, tag);
}

int communications(void) {
  int count = 0;
  for (int i = 0; i < fake->call_count && i < FAKE_CALLS; i++) count += fake->calls[i].comm != 0;
  return count;
}

void fill(void *data, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) ((unsigned char *)data)[i] = (unsigned char)(7 * i + 3 + i / 251);
}

void blank(void *data, size_t bytes) { memset(data, 0xee, bytes); }

static bool all(const void *data, size_t from, size_t to, unsigned char value) {
  for (size_t i = from; i < to; i++)
    if (((const unsigned char *)data)[i] != value) return false;
  return true;
}

bool is_blank(const void *data, size_t from, size_t to) { return all(data, from, to, 0xee); }

bool is_zero(const void *data, size_t from, size_t to) { return all(data, from, to, 0); }
bool is_spoilt(const void *data, size_t to) { return all(data, 0, to, 0xff); }

void for_all(void (*body)(const struct share *)) {
  static const struct {
    int rank, size;
  } places[] = {{0, 1}, {0, 2}, {1, 2}, {0, 3}, {1, 3}, {2, 3}, {3, 4}};
  for (size_t k = 0; k < sizeof places / sizeof *places; k++)
    for (const struct datatype *row = datatype_table; row->name != NULL; row++)
      FOR_VALUES (int, count, 0, 1, 2, 7) {
        context("rank %d of %d, %d of %s", places[k].rank, places[k].size, *count, row->name);
        prepare();
        body(&(struct share){world(places[k].rank, places[k].size), places[k].rank, places[k].size, row->code, *count,
                             (size_t)*count * row->bytes});
      }
}

/* --- what is said --- */

char caught[8192];
static FILE *caught_file;
static int usual_stderr;

void catch_stderr(void) {
  fflush(stderr);
  caught_file = tmpfile();
  usual_stderr = dup(STDERR_FILENO);
  if (caught_file == NULL || usual_stderr < 0 || dup2(fileno(caught_file), STDERR_FILENO) < 0) abort();
}

void release_stderr(void) {
  fflush(stderr);
  dup2(usual_stderr, STDERR_FILENO);
  close(usual_stderr);
  rewind(caught_file);
  caught[fread(caught, 1, sizeof caught - 1, caught_file)] = '\0';
  fclose(caught_file);
  context("what was said: '%s'", caught);
}

bool is_like(const char *text, const char *pattern, int flags, regmatch_t groups[3]) {
  regex_t regex;
  if (regcomp(&regex, pattern, REG_EXTENDED | flags) != 0) return CHECK(false);
  bool like = regexec(&regex, text, 3, groups, 0) == 0;
  regfree(&regex);
  return like;
}

/* --- the program --- */

static bool open_fake(const char *path) {
  char version[256];
  fake_library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  fake = fake_library != NULL ? dlsym(fake_library, "fake_control") : NULL;
  if (fake == NULL) return false;
  abi = abi_find(fake_library, version, sizeof version);
  if (abi == NULL || abi->load(fake_library) != NULL) return false;
  runtime.abi = abi;
  for (const struct datatype *row = datatype_table; row->name != NULL; row++) {
    size_t bytes = 0;
    runtime.datatypes[row->code] = fake->datatype(row->mpi, &bytes);
    runtime.known[row->code] = true;
    context("%s as %s", row->name, row->mpi);
    CHECK_EQUAL(bytes, row->bytes);
  }
  return true;
}

static struct test *tests;
void test_add(struct test *test) {
  struct test **at = &tests;
  while (*at != NULL && (*at)->line < test->line) at = &(*at)->next;
  test->next = *at;
  *at = test;
}

__attribute__((weak)) void prepare(void) {}
__attribute__((weak)) void check_after(void) {}

/* What a test may have left switched on, and what it must not have left behind. */
static void run_one(const struct test *test) {
  int before = failures;
  where[0] = '\0';
  derivative = leaf = function = 0;
  if (fake != NULL) fake->reset();
  prepare();
  int operations = fake != NULL ? fake->live_operations : 0;
  test->run();
  check_after();
  watchdog_stop(); /* it reads what is put back now */
  compare_off();
  if (fake != NULL) {
    CHECK_EQUAL(fake->live_groups + fake->live_types, 0);
    CHECK_EQUAL(fake->live_requests, 0);
    CHECK_EQUAL(fake->live_matched, 0);
    CHECK_EQUAL(fake->queued, 0);
    CHECK_EQUAL(fake->live_operations, operations);
    CHECK_EQUAL(requests_in_flight(), 0);
    fake->reset();
  }
  CHECK_EQUAL(live_errors(), 0);
  runtime.max_count = INT_MAX;
  runtime.serialize = runtime.unmarked = false;
  atomic_store(&runtime.log, false);
  atomic_store(&runtime.labels, false);
  printf("%s %s\n", failures == before ? "ok  " : "FAIL", test->name);
}

uint64_t draw_state;
uint32_t draw(uint32_t below) {
  draw_state ^= draw_state >> 12, draw_state ^= draw_state << 25, draw_state ^= draw_state >> 27;
  return (uint32_t)((draw_state * 0x2545f4914f6cdd1dull) >> 33) % below;
}
bool once_in(uint32_t n) { return draw(n) == 0; }

void put(struct numbers *numbers, const int64_t *values, size_t count) {
  if (numbers->count + count > sizeof numbers->values / sizeof *values) abort();
  memcpy(numbers->values + numbers->count, values, count * sizeof *values);
  numbers->count += count;
}

int run_tests(int argc, char **argv) {
  registry_begin(KEY);
  if (argc > 1 && !open_fake(argv[1])) {
    printf("cannot open %s\n", argv[1]);
    return 1;
  }
  int ran = 0;
  for (const struct test *test = tests; test != NULL; test = test->next)
    if (argc < 3 || strcmp(argv[2], test->name) == 0) run_one(test), ran++;
  printf("%d tests, %d failures\n", ran, failures);
  return failures > 0 || ran == 0;
}

__attribute__((weak)) int main(int argc, char **argv) { return run_tests(argc, argv); }
