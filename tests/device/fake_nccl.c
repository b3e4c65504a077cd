/* The fake whose rules are in fake_nccl.h. */
#define _GNU_SOURCE
#include "fake_nccl.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/float16.h"
#include "fake_driver.h"

#define EXPORT __attribute__((visibility("default")))

enum { RANKS = FAKE_NCCL_RANKS, ROOM = 1 << 17, MOST = 1024, NAMES = 32 };
enum kind { SEND, RECEIVE, REDUCE, GATHER, BROADCAST, REDUCE_TO, REDUCE_SCATTER };

typedef struct {
  char internal[128];
} ncclUniqueId;

/* Room for a message, or a part of it. `full` counts how often the sender has filled the box, and `empty` how often the
 * receiver has emptied it. */
struct box {
  atomic_long full, empty;
  size_t bytes;
  long what[4];
  char data[ROOM];
};
struct shared {
  atomic_int joined, met[RANKS][RANKS];
  struct box boxes[RANKS][RANKS]; /* from, to */
};
typedef struct ncclComm {
  struct ncclComm *before;
  struct shared *shared;
  int rank, size, outstanding;
  long calls;
  bool met[RANKS], destroyed;
} *ncclComm_t;

/* One call of a group. `root` is the peer of a message. */
struct todo {
  enum kind kind;
  const char *in;
  char *out;
  size_t count;
  int type, op, root;
  ncclComm_t comm;
  void *stream;
  long call;
};
struct group {
  int count;
  struct todo todo[MOST];
};

static struct fake_nccl control;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the counters */
static atomic_int inside;
static struct counted {
  const char *name;
  int calls, left, code; /* of `left` calls the last one fails with this code; left 0: none fails */
} counted[NAMES];
static _Thread_local __attribute__((tls_model("initial-exec"))) struct group *open_group;
static _Thread_local __attribute__((tls_model("initial-exec"))) int depth;

static struct fake_driver *driver(void) {
  static struct fake_driver *(*get)(void);
  if (get == NULL) *(void **)&get = dlsym(RTLD_DEFAULT, "fake_driver");
  return get();
}

static void violate(const char *text) {
  struct fake_driver *d = driver();
  fprintf(stderr, "fake nccl: %s\n", text);
  if (d->violations++ == 0) snprintf(d->violation, sizeof d->violation, "nccl: %s", text);
}

__attribute__((noreturn)) static void die(const struct todo *t, const char *why) {
  fprintf(stderr, "fake nccl: rank %d: %s (kind %d, %zu elements of type %d, operation %d, root %d, call %ld)\n",
          t->comm->rank, why, (int)t->kind, t->count, t->type, t->op, t->root, t->call);
  _exit(FAKE_NCCL_STATUS);
}

/* Returns the counters of a function. Under the lock. */
static struct counted *count_of(const char *name) {
  struct counted *row = counted;
  while (row->name != NULL && strcmp(row->name, name) != 0) row++;
  row->name = name;
  return row;
}

/* Counts a call of the interface. Returns 0, or the code that the call must return at once. */
static int begin(const char *name) {
  if (atomic_fetch_add(&inside, 1) > 0) violate("two threads are inside at a time");
  pthread_mutex_lock(&lock);
  struct counted *row = count_of(name);
  row->calls++;
  int code = row->left > 0 && --row->left == 0 ? row->code : 0;
  pthread_mutex_unlock(&lock);
  const char *failing = getenv("FAKE_NCCL_FAIL");
  return failing != NULL && strcmp(failing, name) == 0 ? 2 : code;
}

static int end(int code) {
  atomic_fetch_sub(&inside, 1);
  return code;
}

static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
static size_t bytes_of(const struct todo *t) { return t->count * widths[t->type]; }

/* --- a group --- */

static bool reads(const struct todo *t) {
  return t->kind != RECEIVE && (t->kind != BROADCAST || t->comm->rank == t->root);
}
static bool writes(const struct todo *t) {
  return t->kind != SEND && (t->kind != REDUCE_TO || t->comm->rank == t->root);
}
static size_t read_bytes(const struct todo *t) {
  return bytes_of(t) * (t->kind == REDUCE_SCATTER ? (size_t)t->comm->size : 1);
}
static size_t written_bytes(const struct todo *t) {
  return bytes_of(t) * (t->kind == GATHER ? (size_t)t->comm->size : 1);
}

#ifdef FAKE_NCCL_ALONE

#include "fake_mpi.h"

static void copy_changed(char *to, const char *from, size_t bytes, int by) {
  for (size_t i = 0; i < bytes; i++) to[i] = (char)(from[i] + by);
}

static void fill_from_rank(char *to, size_t bytes, int rank) {
  for (size_t i = 0; i < bytes; i++) to[i] = (char)fake_byte(rank, (int64_t)i);
}

/* Returns the nth send of the group to the rank `to`, where g->todo[at] is the nth receive from a rank; NULL: there is
 * none. */
static const struct todo *send_for(const struct group *g, int at, int to) {
  int nth = 0;
  for (int i = 0; i < at; i++) nth += g->todo[i].kind == RECEIVE && g->todo[i].root == g->todo[at].root;
  for (int i = 0; i < g->count; i++)
    if (g->todo[i].kind == SEND && g->todo[i].root == to && nth-- == 0) return &g->todo[i];
  return NULL;
}

static void run_group(struct group *g, char *const in[], char *const out[]) {
  for (int i = 0; i < g->count; i++) {
    const struct todo *t = &g->todo[i];
    size_t bytes = bytes_of(t);
    int rank = t->comm->rank, size = t->comm->size;
    const struct todo *sent = NULL;
    switch (t->kind) {
      case SEND:
        break;
      case RECEIVE:
        if ((sent = send_for(g, i, t->root)) == NULL) sent = send_for(g, i, rank);
        if (sent != NULL && bytes_of(sent) != bytes) die(t, "another number of bytes is sent");
        if (sent != NULL)
          copy_changed(out[i], in[sent - g->todo], bytes, t->root - rank);
        else
          fill_from_rank(out[i], bytes, t->root);
        break;
      case GATHER:
        for (int r = 0; r < size; r++) copy_changed(out[i] + (size_t)r * bytes, in[i], bytes, r - rank);
        break;
      case BROADCAST:
        if (rank != t->root)
          fill_from_rank(out[i], bytes, t->root);
        else
          memcpy(out[i], in[i], bytes);
        break;
      default:
        if (writes(t))
          copy_changed(out[i], in[i] + (t->kind == REDUCE_SCATTER ? (size_t)rank * bytes : 0), bytes, size);
    }
  }
}

static void meet(const struct group *g) { (void)g; }
static struct shared *join(const ncclUniqueId *id, int size) {
  (void)id, (void)size;
  return NULL;
}

#else

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#define COMBINE(a, b) \
  (op == 0 ? (a) + (b) : op == 1 ? (a) * (b) : op == 2 ? ((a) > (b) ? (a) : (b)) : (a) < (b) ? (a) : (b))
#define TYPE(code, type)                                                                           \
  case code:                                                                                       \
    for (size_t i = 0; i < n; i++) ((type *)y)[i] = (type)COMBINE(((type *)y)[i], ((type *)z)[i]); \
    break;
#define HALF(code, name)                                                                      \
  case code:                                                                                  \
    for (size_t i = 0; i < n; i++) {                                                          \
      float a = name##_to_float(((uint16_t *)y)[i]), b = name##_to_float(((uint16_t *)z)[i]); \
      ((uint16_t *)y)[i] = name##_from_float(COMBINE(a, b));                                  \
    }                                                                                         \
    break;

/* y = y op z */
static void combine(void *y, void *z, size_t n, int type, int op) {
  switch (type) {
    TYPE(0, int8_t)
    TYPE(1, uint8_t)
    TYPE(2, uint32_t) /* signed integers wrap */
    TYPE(3, uint32_t)
    TYPE(4, uint64_t)
    TYPE(5, uint64_t)
    HALF(6, float16)
    TYPE(7, float)
    TYPE(8, double)
    HALF(9, bfloat16)
  }
}

static void combine_signed(void *y, void *z, size_t n, int type, int op) {
  if (op < 2 || (type != 2 && type != 4)) return combine(y, z, n, type, op);
  switch (type) {
    TYPE(2, int32_t)
    TYPE(4, int64_t)
  }
}

/* A part of a call: bytes to a rank, or from a rank. */
struct part {
  const struct todo *call;
  bool sends, done;
  int peer;
  char *data;
  size_t bytes, moved;
};

/* Fills in what the sender and the receiver of a message must agree on. */
static void describe(const struct todo *t, long what[4]) {
  bool single = t->kind == SEND || t->kind == RECEIVE;
  what[0] = single ? SEND : t->kind;
  what[1] = (long)t->count * 100 + t->type;
  what[2] = single ? 0 : t->op * 100 + t->root;
  what[3] = single ? 0 : t->call;
}

/* Moves as much of a part as the box allows now. Returns whether it has moved anything. */
static bool advance(struct part *p) {
  ncclComm_t c = p->call->comm;
  struct box *b = p->sends ? &c->shared->boxes[c->rank][p->peer] : &c->shared->boxes[p->peer][c->rank];
  long full = atomic_load(&b->full), empty = atomic_load(&b->empty), what[4];
  size_t rest = p->bytes - p->moved, n = rest < ROOM ? rest : ROOM;
  describe(p->call, what);
  if (p->sends != (full == empty)) return false;
  if (p->sends) {
    b->bytes = n;
    memcpy(b->what, what, sizeof what);
    memcpy(b->data, p->data + p->moved, n);
    atomic_store(&b->full, full + 1);
  } else {
    if (memcmp(b->what, what, sizeof what) != 0) die(p->call, "the ranks' calls differ");
    memcpy(p->data + p->moved, b->data, n = b->bytes);
    atomic_store(&b->empty, empty + 1);
  }
  p->moved += n;
  p->done = p->moved == p->bytes;
  return true;
}

/* Moves all parts at the same time, but the parts of one direction and one peer one after the other. */
static void exchange(struct part *parts, int count) {
  double begun = now();
  for (int left = count; left > 0;) {
    bool busy[2][RANKS] = {{false}}, moved = false;
    for (int i = 0; i < count; i++) {
      struct part *p = &parts[i];
      bool *taken = &busy[p->sends][p->peer];
      if (p->done || *taken) continue;
      *taken = true;
      moved |= advance(p);
      left -= p->done;
      if (now() - begun > FAKE_NCCL_PATIENCE) die(p->call, "has waited for too long");
    }
    if (!moved) sched_yield();
  }
}

static void run_group(struct group *g, char *const in[], char *const out[]) {
  struct part *parts = calloc((size_t)g->count * 2 * RANKS + 1, sizeof *parts);
  char **all = calloc((size_t)g->count + 1, sizeof *all);
  int count = 0;
  for (int i = 0; i < g->count; i++) {
    const struct todo *t = &g->todo[i];
    size_t bytes = bytes_of(t);
#define PART(sends, peer, data) parts[count++] = (struct part){t, sends, false, peer, data, bytes, 0}
    if (t->kind == SEND) PART(true, t->root, in[i]);
    if (t->kind == RECEIVE) PART(false, t->root, out[i]);
    if (t->kind == BROADCAST && t->comm->rank != t->root) PART(false, t->root, out[i]);
    if (t->kind == BROADCAST && t->comm->rank == t->root) {
      for (int r = 0; r < t->comm->size; r++)
        if (r != t->root) PART(true, r, in[i]);
      if (out[i] != in[i]) memcpy(out[i], in[i], bytes);
    }
    if (t->kind == SEND || t->kind == RECEIVE || t->kind == BROADCAST) continue;
    all[i] = malloc(bytes * (size_t)t->comm->size);
    for (int r = 0; r < t->comm->size; r++) {
      PART(true, r, in[i] + (t->kind == REDUCE_SCATTER ? (size_t)r * bytes : 0));
      PART(false, r, all[i] + (size_t)r * bytes);
    }
  }
  exchange(parts, count);
  for (int i = 0; i < g->count; i++) {
    const struct todo *t = &g->todo[i];
    size_t bytes = bytes_of(t);
    if (all[i] == NULL) continue;
    for (int r = 1; r < t->comm->size && t->kind != GATHER; r++)
      combine_signed(all[i], all[i] + (size_t)r * bytes, t->count, t->type, t->op);
    if (writes(t)) memcpy(out[i], all[i], written_bytes(t));
    free(all[i]);
  }
  free(all);
  free(parts);
}

/* Waits for each peer that a group names for the first time. */
static void meet(const struct group *g) {
  for (int i = 0; i < g->count; i++) {
    const struct todo *t = &g->todo[i];
    for (int r = 0; r < t->comm->size; r++)
      if (t->kind > RECEIVE || t->root == r) atomic_store(&t->comm->shared->met[t->comm->rank][r], 1);
  }
  double begun = now();
  for (int i = 0; i < g->count; i++) {
    const struct todo *t = &g->todo[i];
    for (int r = 0; r < t->comm->size; r++) {
      if ((t->kind <= RECEIVE && t->root != r) || t->comm->met[r]) continue;
      while (atomic_load(&t->comm->shared->met[r][t->comm->rank]) == 0) {
        if (now() - begun > FAKE_NCCL_PATIENCE) die(t, "a peer has not come");
        sched_yield();
      }
      t->comm->met[r] = true;
    }
  }
}

static struct shared *join(const ncclUniqueId *id, int size) {
  int file = shm_open(id->internal, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(struct shared)) != 0) return NULL;
  struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (shared == MAP_FAILED) return NULL;
  atomic_fetch_add(&shared->joined, 1);
  while (atomic_load(&shared->joined) < size) sched_yield();
  shm_unlink(id->internal);
  return shared;
}

#endif

/* The kernel of a group: spoils the memory that it will write, and runs the group. */
static void run_kernel(void *data) {
  struct group *g = data;
  char *in[MOST], *out[MOST];
  for (int i = 0; i < g->count; i++) {
    const struct todo *t = &g->todo[i];
    in[i] = reads(t) ? driver()->reach(t->in) : NULL;
    out[i] = writes(t) ? driver()->reach(t->out) : NULL;
  }
  for (int i = 0; i < g->count; i++) {
    bool in_place = false;
    for (int k = 0; k < g->count; k++) in_place |= in[k] != NULL && in[k] == out[i];
    if (out[i] != NULL && !in_place) memset(out[i], FAKE_POISON, written_bytes(&g->todo[i]));
  }
  run_group(g, in, out);
  pthread_mutex_lock(&lock);
  control.outstanding--;
  g->todo[0].comm->outstanding--;
  pthread_mutex_unlock(&lock);
  free(g);
}

/* --- the interface --- */

EXPORT int ncclGetVersion(int *version) {
  int code = begin("GetVersion");
  const char *text = getenv("FAKE_NCCL_VERSION");
  *version = text != NULL ? atoi(text) : 22809;
  return end(code);
}

EXPORT const char *ncclGetErrorString(int code) {
  return code == 2 ? "unhandled system error" : "an error of the fake";
}
EXPORT const char *ncclGetLastError(ncclComm_t comm) {
  (void)comm;
  return "asked to fail";
}

EXPORT int ncclGetUniqueId(ncclUniqueId *id) {
  static int number;
  int code = begin("GetUniqueId");
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof id->internal, "/jaxmpi-fake-nccl-%d-%d", getpid(), number++);
  return end(code);
}

EXPORT int ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, void *config) {
  int code = begin("CommInitRankConfig");
  *comm = NULL;
  const size_t *bytes = config;
  if (*bytes < 48 || *(const unsigned *)(bytes + 1) != 0xcafebeef) violate("the configuration is not valid");
  if (size > RANKS) code = 4;
  struct shared *shared = join(&id, size); /* a rank that fails joins, too, because the others wait for it */
  if (code != 0) return end(code);
  static ncclComm_t all; /* never freed, so that the fake knows destroyed communicators */
  *comm = calloc(1, sizeof **comm);
  **comm = (struct ncclComm){.before = all, .shared = shared, .rank = rank, .size = size};
  all = *comm;
  pthread_mutex_lock(&lock);
  control.live++;
  pthread_mutex_unlock(&lock);
  return end(0);
}

static int end_comm(ncclComm_t comm, const char *name, bool aborts) {
  int code = begin(name);
  pthread_mutex_lock(&lock);
  if (comm->destroyed) violate("the communicator was destroyed before");
  if (!aborts && comm->outstanding > 0) violate("a communicator is destroyed while calls are outstanding");
  comm->destroyed = true;
  control.live--;
  pthread_mutex_unlock(&lock);
  return end(code);
}

EXPORT int ncclCommDestroy(ncclComm_t comm) { return end_comm(comm, "CommDestroy", false); }
EXPORT int ncclCommAbort(ncclComm_t comm) { return end_comm(comm, "CommAbort", true); }

EXPORT int ncclCommGetAsyncError(ncclComm_t comm, int *error) {
  const char *text = getenv("FAKE_NCCL_ASYNC");
  if (comm->destroyed) violate("the communicator was destroyed before");
  *error = text != NULL ? atoi(text) : 0;
  return 0;
}

static void open_one(void) {
  if (depth++ == 0) open_group = calloc(1, sizeof *open_group);
}

static int close_one(void) {
  if (--depth > 0) return 0;
  struct group *g = open_group;
  open_group = NULL;
  if (g->count == 0) return free(g), 0;
  for (int i = 0; i < g->count; i++)
    if (g->todo[i].stream != g->todo[0].stream || g->todo[i].comm != g->todo[0].comm) die(&g->todo[i], "two streams");
  meet(g);
  pthread_mutex_lock(&lock);
  control.groups++;
  control.arrays += g->count;
  control.outstanding++;
  g->todo[0].comm->outstanding++;
  pthread_mutex_unlock(&lock);
  return driver()->launch(g->todo[0].stream, run_kernel, g) != 0 ? 1 : 0;
}

EXPORT int ncclGroupStart(void) {
  int code = begin("GroupStart");
  if (code == 0) open_one();
  return end(code);
}

EXPORT int ncclGroupEnd(void) {
  int code = begin("GroupEnd");
  if (depth == 0) violate("a group ends that has not begun");
  if (code != 0 && depth > 0) open_group->count = 0; /* no call of the group is executed */
  int closed = depth > 0 ? close_one() : 0;
  return end(code != 0 ? code : closed);
}

static int add(const char *name, struct todo todo) {
  int code = begin(name);
  if (code != 0) {
    if (open_group != NULL) open_group->count = 0;
    return end(code);
  }
  if (todo.comm == NULL || todo.comm->destroyed) violate("the communicator is not valid");
  if (todo.type < 0 || todo.type > 9) violate("there is no such type");
  if (todo.root < 0 || todo.root >= todo.comm->size) violate("there is no such rank");
  if (reads(&todo) && !driver()->known(todo.in, read_bytes(&todo))) violate("what is read is no memory of a device");
  if (writes(&todo) && !driver()->known(todo.out, written_bytes(&todo)))
    violate("what is written is no memory of a device");
  if (todo.kind > RECEIVE) todo.call = ++todo.comm->calls;
  open_one();
  if (open_group->count == MOST) die(&todo, "too many calls in a group");
  open_group->todo[open_group->count++] = todo;
  return end(close_one());
}

EXPORT int ncclSend(const void *in, size_t n, int type, int peer, ncclComm_t comm, void *stream) {
  return add("Send", (struct todo){SEND, in, NULL, n, type, 0, peer, comm, stream, 0});
}
EXPORT int ncclRecv(void *out, size_t n, int type, int peer, ncclComm_t comm, void *stream) {
  return add("Recv", (struct todo){RECEIVE, NULL, out, n, type, 0, peer, comm, stream, 0});
}
EXPORT int ncclAllReduce(const void *in, void *out, size_t n, int type, int op, ncclComm_t comm, void *stream) {
  return add("AllReduce", (struct todo){REDUCE, in, out, n, type, op, 0, comm, stream, 0});
}
EXPORT int ncclReduce(const void *in, void *out, size_t n, int type, int op, int root, ncclComm_t comm, void *stream) {
  return add("Reduce", (struct todo){REDUCE_TO, in, out, n, type, op, root, comm, stream, 0});
}
EXPORT int ncclReduceScatter(const void *in, void *out, size_t n, int type, int op, ncclComm_t comm, void *stream) {
  return add("ReduceScatter", (struct todo){REDUCE_SCATTER, in, out, n, type, op, 0, comm, stream, 0});
}
EXPORT int ncclAllGather(const void *in, void *out, size_t n, int type, ncclComm_t comm, void *stream) {
  return add("AllGather", (struct todo){GATHER, in, out, n, type, 0, 0, comm, stream, 0});
}
EXPORT int ncclBroadcast(const void *in, void *out, size_t n, int type, int root, ncclComm_t comm, void *stream) {
  return add("Broadcast", (struct todo){BROADCAST, in, out, n, type, 0, root, comm, stream, 0});
}

/* --- control --- */

static void reset(void) {
  pthread_mutex_lock(&lock);
  memset(counted, 0, sizeof counted);
  control.groups = control.arrays = 0;
  pthread_mutex_unlock(&lock);
}

static void fail(const char *function, int nth, int code) {
  pthread_mutex_lock(&lock);
  struct counted *row = count_of(function);
  row->left = nth;
  row->code = code;
  pthread_mutex_unlock(&lock);
}

static int calls(const char *function) {
  pthread_mutex_lock(&lock);
  int count = count_of(function)->calls;
  pthread_mutex_unlock(&lock);
  return count;
}

static struct fake_nccl control = {.reset = reset, .fail = fail, .calls = calls};
EXPORT struct fake_nccl *fake_nccl(void) { return &control; }
