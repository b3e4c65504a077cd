#include "requests/table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "core/failure.h"
#include "requests/memory.h"
#include "requests/progress.h"

enum {
  MOST_PLACES = (1 << 24) - 1,
  SPARE_REQUESTS = 8,
  MOST_NAMED = 10,
  MILLISECONDS_AT_END = 5000,
  MILLISECONDS_TO_GIVE_UP = 200
};

/* The lock protects all of it. */
static struct {
  pthread_mutex_t lock;
  struct request **places; /* NULL: no request there */
  int room, used;          /* of places */
  uint32_t *generations;   /* of the last request at each place */
  int *unused, unused_count;
  int64_t in_flight, begun;
  bool ended;            /* MPI is being finalized: no request is polled any more */
  _Atomic pid_t process; /* the process that started the requests; 0: none */
} all = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Usual requests that are not in use. They keep their places. They are taken and given back without the lock. */
static struct request *_Atomic spares[SPARE_REQUESTS];

static void poll_requests(void);

/* --- memory --- */

bool request_room(struct request *request, size_t bytes, char **data) {
  bool is_small = bytes <= sizeof request->small;
  if (is_small)
    *data = request->small;
  else
    request->block = block_take(bytes, data);
  return is_small || request->block != NULL;
}

static struct request *allocate(bool usual, int handles, int receives) {
  struct request *made;
  int many_handles = usual ? 1 : handles, many_receives = usual ? 1 : receives;
  size_t head = (sizeof *made + 63) / 64 * 64, receiving = (size_t)many_receives * sizeof *made->receives;
  made = aligned_alloc(64, (head + receiving + (size_t)many_handles * sizeof *made->handles + 63) / 64 * 64);
  if (made == NULL) return NULL;
  made->usual = usual;
  made->receives = (struct receive *)(void *)((char *)made + head);
  made->handles = (intptr_t *)(void *)((char *)made->receives + receiving);
  return made;
}

static struct request *spare_take(void) {
  for (int i = 0; i < SPARE_REQUESTS; i++) {
    struct request *request = atomic_load_explicit(&spares[i], memory_order_relaxed);
    if (request != NULL && (request = atomic_exchange(&spares[i], NULL)) != NULL) return request;
  }
  return NULL;
}

/* False: the place for spares is full. */
static bool spare_give(struct request *request) {
  for (int i = 0; i < SPARE_REQUESTS; i++) {
    struct request *none = NULL;
    if (atomic_load_explicit(&spares[i], memory_order_relaxed) == NULL &&
        atomic_compare_exchange_strong(&spares[i], &none, request))
      return true;
  }
  return false;
}

/* --- ids --- */

static bool grow_table(void) {
  int room = all.room > 0 ? 2 * all.room : 64;
  if (room > MOST_PLACES) return false;
  struct request **places = realloc(all.places, (size_t)room * sizeof *places);
  if (places != NULL) all.places = places;
  uint32_t *generations = realloc(all.generations, (size_t)room * sizeof *generations);
  if (generations != NULL) all.generations = generations;
  int *unused = realloc(all.unused, (size_t)room * sizeof *unused);
  if (unused != NULL) all.unused = unused;
  if (places == NULL || generations == NULL || unused == NULL) return false;
  all.room = room;
  return true;
}

static int new_place(void) {
  if (all.unused_count > 0) return all.unused[--all.unused_count];
  if (all.used == all.room && !grow_table()) return -1;
  all.places[all.used] = NULL;
  all.generations[all.used] = 0;
  return all.used++;
}

/* An id is a pair of float32, or one pair for each array of a batch. */
static bool is_id(const struct buffer *id) {
  return id->type != NULL && id->type->code == FFI_DTYPE_F32 && id->count >= 2 && id->count % 2 == 0;
}

/* The constant for no request (NOTHING of _operations/requests.py): zeros of int32. */
static bool is_nothing(const struct buffer *id) {
  if (id->type == NULL || id->type->code != FFI_DTYPE_S32) return false;
  const int32_t *values = id->data;
  int64_t zeros = 0;
  while (zeros < id->count && values[zeros] == 0) zeros++;
  return zeros == id->count;
}

static ffi_error *fail_id(const struct call *call, const struct buffer *id) {
  if (id->count == 0)
    return call_fail(call, FFI_UNIMPLEMENTED,
                     "a request of no arrays at all: jax.vmap maps it over an axis of length 0");
  return call_fail(call, FFI_INTERNAL, "the id of a request has another shape: reinstall jaxmpi");
}

/* Return a request with a place. `place`: -1 if none was left. */
static struct request *new_request(bool usual, int handles, int receives, int *place) {
  struct request *made = allocate(usual, handles, receives);
  pthread_mutex_lock(&all.lock);
  *place = made != NULL ? new_place() : 0;
  pthread_mutex_unlock(&all.lock);
  if (made != NULL) made->place = *place;
  if (*place >= 0) return made;
  free(made);
  return NULL;
}

static void free_request(struct request *request) {
  pthread_mutex_lock(&all.lock);
  all.unused[all.unused_count++] = request->place;
  pthread_mutex_unlock(&all.lock);
  free(request);
}

ffi_error *request_new(const struct call *call, const struct buffer *id, size_t bytes, int handles, int receives,
                       struct request **request) {
  if (!is_id(id)) return fail_id(call, id);
  bool usual = handles <= 1 && receives <= 1;
  int place = 0;
  struct request *made = usual ? spare_take() : NULL;
  if (made == NULL) made = new_request(usual, handles, receives, &place);
  if (place < 0) return call_fail(call, FFI_INTERNAL, "too many requests that have not been waited for");
  if (made == NULL) return call_fail(call, FFI_INTERNAL, "no memory for a request");
  *made = (struct request){.place = made->place,
                           .usual = made->usual,
                           .run = ffi_run(call->frame),
                           .operation = call->operation,
                           .comm = call->comm,
                           .batch = id->count / 2,
                           .receive_count = receives,
                           .handles = made->handles,
                           .receives = made->receives};
  if (bytes > 0 && !request_room(made, bytes, &made->data)) {
    free_request(made);
    return call_fail(call, FFI_INTERNAL, "no memory to keep %zu bytes in flight", bytes);
  }
  memcpy(made->attributes, call->attributes, sizeof made->attributes);
  summarize(call, made->summary);
  memset(made->receives, 0, (size_t)receives * sizeof *made->receives);
  *request = made;
  return NULL;
}

void request_end(struct request *request) {
  block_give(request->block);
  if (!request->usual || !spare_give(request)) free_request(request);
}

static void write_id(const struct request *request, const struct buffer *id) {
  float *to = id->data;
  for (int64_t i = 0; i + 1 < id->count; i += 2) {
    to[i] = (float)(request->place + 1);
    to[i + 1] = (float)request->generation;
  }
}

/* A child of fork has neither the thread nor the requests. */
static void note_process(void) {
  if (atomic_load_explicit(&all.process, memory_order_relaxed) == 0) atomic_store(&all.process, getpid());
}

void request_post(struct receive *receive) {
  note_process();
  queue_post(receive);
  progress_posted(poll_requests);
}

void request_begin(struct request *request, const struct buffer *id, int64_t moved) {
  pthread_mutex_lock(&all.lock);
  uint32_t generation = all.generations[request->place] % MOST_PLACES + 1;
  request->generation = all.generations[request->place] = generation;
  request->serial = ++all.begun;
  note_process();
  all.places[request->place] = request;
  all.in_flight++;
  for (int i = 0; i < request->receive_count; i++)
    if (request->receives[i].source != runtime.abi->proc_null) request_post(&request->receives[i]);
  request->is_long = moved >= LONG_BYTES;
  if (request->is_long) progress_long(1, poll_requests);
  pthread_mutex_unlock(&all.lock);
  write_id(request, id);
}

/* Return the place of the request with an id, or -1. */
static int place_of(const struct buffer *id) {
  const float *ids = id->data;
  if (!is_id(id) || !(ids[0] >= 1) || ids[0] > (float)all.used || ids[0] != (float)(int)ids[0]) return -1;
  int place = (int)ids[0] - 1;
  const struct request *there = all.places[place];
  return there != NULL && (float)there->generation == ids[1] ? place : -1;
}

static const char *why_none(bool none, int64_t zero) {
  if (none && zero < 0)
    return "on this rank an operation was started in a function that is differentiated, and is not waited for there: "
           "gradients would be wrong. Wait for each request inside of that function";
  return none ? "this is not a request: it was never started"
              : "this request has been waited for already, or is of another process, or the communicator has been "
                "given up by jaxmpi.survive.recover. Each request is waited for once. If a function that waits is "
                "executed "
                "again "
                "(jax.checkpoint executes one again for its derivative), start in that function as well";
}

/* Take the request at a place out of the table. The caller holds the lock. */
static struct request *take_from(int place) {
  struct request *taken = all.places[place];
  all.places[place] = NULL;
  all.in_flight--;
  progress_long(-taken->is_long, poll_requests);
  return taken;
}

struct request *request_take(const struct call *call, const struct buffer *id, int64_t zero, ffi_error **error) {
  *error = NULL;
  if (zero > 0 && is_nothing(id)) return NULL;
  if (!is_id(id)) *error = fail_id(call, id);
  if (*error != NULL) return NULL;
  const float *ids = id->data;
  for (int64_t i = 2; i < id->count && *error == NULL; i++)
    if (ids[i] != ids[i % 2])
      *error =
          call_fail(call, FFI_UNIMPLEMENTED,
                    "several requests where one is expected: jax.vmap maps the predicate of a jax.lax.cond or "
                    "while_loop that returns it, and its branches have started one each. Wait inside of the branch");
  bool none = ids[0] == 0 && ids[1] == 0;
  if (*error != NULL || (none && zero > 0)) return NULL;
  pthread_mutex_lock(&all.lock);
  int place = place_of(id);
  struct request *request = place >= 0 ? all.places[place] : NULL;
  if (request != NULL) {
    take_from(place);
    if (request->receive_count == 1 && request->receives[0].request != NULL)
      request->receives[0].exclusive = queue_withdraw_alone(&request->receives[0]);
  }
  pthread_mutex_unlock(&all.lock);
  if (request == NULL) *error = call_fail(call, FFI_FAILED_PRECONDITION, "%s", why_none(none, zero));
  return request;
}

/* Take the next irecv of a run out of the table, from place `at` on, unless the message has been matched. */
static struct request *take_abandoned(int64_t run, int *at) {
  struct request *taken = NULL;
  pthread_mutex_lock(&all.lock);
  for (; *at < all.used && taken == NULL; ++*at) {
    struct request *request = all.places[*at];
    if (request != NULL && request->run == run && request->operation->row == ROW_irecv &&
        queue_withdraw(&request->receives[0]))
      taken = take_from(*at);
  }
  pthread_mutex_unlock(&all.lock);
  return taken;
}

void requests_abandon(int64_t run) {
  int at = 0;
  if (run == 0) return;
  for (struct request *request; (request = take_abandoned(run, &at)) != NULL;) request_end(request);
}

static ffi_error *fail_order(const struct call *call, const struct operation *started) {
  const char *advice = attribute_of(started, KIND_TAG) >= 0    ? "give the messages tags of their own"
                       : attribute_of(started, KIND_PLAN) >= 0 ? "make one of the grids or maps on comm.Dup()"
                                                               : "use a communicator of its own, comm.Dup(), for one";
  return call_fail(
      call, FFI_FAILED_PRECONDITION,
      "in reverse mode, some operations must be waited for in the order in which they were started, or their gradients "
      "would be exchanged. These are messages with the same rank and tag, the collectives of a communicator, and one "
      "exchange several times: MPI cannot distinguish them. Wait in that order, or %s",
      advice);
}

/* Return whether it is the adjoint of an operation, or the value of one in a higher derivative. */
static bool is_adjoint(const struct request *request) {
  int own = attribute_of(request->operation, KIND_ADJOINT),
      all_have = attribute_of(request->operation, KIND_DERIVATIVE);
  return own >= 0 ? request->attributes[own] != 0
                  : all_have >= 0 && request->attributes[all_have] >= DERIVATIVE_COTANGENT;
}

/* MPI distinguishes collectives by their order alone. */
static bool is_collective(const struct operation *operation) {
  return attribute_of(operation, KIND_DERIVATIVE) >= 0 && attribute_of(operation, KIND_PLAN) < 0;
}

/* Return whether MPI may take one of two adjoints for the other. */
static bool may_be_confused(const struct request *one, const struct request *other) {
  size_t bytes = (size_t)one->operation->attribute_count * sizeof *one->attributes;
  if (is_collective(one->operation)) return is_collective(other->operation) && other->comm == one->comm;
  return other->operation == one->operation && memcmp(other->attributes, one->attributes, bytes) == 0;
}

ffi_error *request_check_order(const struct call *call, const struct request *request) {
  if (!is_adjoint(request)) return NULL;
  bool earlier = false;
  pthread_mutex_lock(&all.lock);
  for (int i = 0; i < all.used && all.in_flight > 0 && !earlier; i++) {
    const struct request *other = all.places[i];
    earlier = other != NULL && other->serial < request->serial && is_adjoint(other) && may_be_confused(request, other);
  }
  pthread_mutex_unlock(&all.lock);
  return earlier ? fail_order(call, request->operation) : NULL;
}

ffi_error *request_check_blocking(const struct call *call, int row, int64_t peer, int64_t tag) {
  const struct operation *operation = &operation_table[row];
  int at_peer = attribute_of(operation, KIND_RANK), at_tag = attribute_of(operation, KIND_TAG);
  bool like = false;
  pthread_mutex_lock(&all.lock);
  for (int i = 0; i < all.used && all.in_flight > 0 && !like; i++) {
    const struct request *other = all.places[i];
    like = other != NULL && other->operation == operation && other->comm == call->comm && is_adjoint(other) &&
           other->attributes[at_peer] == peer && other->attributes[at_tag] == tag;
  }
  pthread_mutex_unlock(&all.lock);
  return like ? fail_order(call, operation) : NULL;
}

int64_t requests_in_flight(void) {
  pthread_mutex_lock(&all.lock);
  int64_t count = all.in_flight;
  pthread_mutex_unlock(&all.lock);
  return count;
}

/* What the background thread calls in each poll. */
static void poll_requests(void) {
  pthread_mutex_lock(&all.lock);
  bool ended = all.ended;
  for (int i = 0; i < all.used && !ended; i++)
    if (all.places[i] != NULL && all.places[i]->is_long) {
      all.places[i]->is_long = runtime.abi->test_request(all.places[i]);
      if (!all.places[i]->is_long) progress_long(-1, poll_requests);
    }
  pthread_mutex_unlock(&all.lock);
}

void requests_forget(const struct communicator *comm) {
  queue_forget(comm);
  if (comm != runtime.self) return;
  progress_end();
  pthread_mutex_lock(&all.lock); /* the last poll is over after this */
  all.ended = true;
  pthread_mutex_unlock(&all.lock);
}

static struct request *take_one_on(const struct communicator *comm) {
  struct request *request = NULL;
  pthread_mutex_lock(&all.lock);
  for (int i = 0; i < all.used && request == NULL; i++)
    if (all.places[i] != NULL && all.places[i]->comm == comm) request = take_from(i);
  pthread_mutex_unlock(&all.lock);
  return request;
}

/* Return whether MPI soon stops using the memory of a request. */
static bool ends_soon(struct request *request) {
  bool under_way = true;
  for (int i = 0; i < MILLISECONDS_TO_GIVE_UP && under_way; i++) {
    pthread_mutex_lock(&all.lock);
    under_way = runtime.abi->test_request(request);
    pthread_mutex_unlock(&all.lock);
    if (under_way) nanosleep(&(struct timespec){0, 1000000}, NULL);
  }
  return !under_way;
}

int64_t requests_give_up_on(const struct communicator *comm) {
  int64_t count = 0;
  for (struct request *request; (request = take_one_on(comm)) != NULL; count++)
    if (ends_soon(request)) request_end(request); /* else the memory is never used again */
  return count;
}

/* --- the end --- */

static void name_request(const struct request *request) {
  char characters[TEXT_BYTES];
  struct text text = text_in(characters, sizeof characters);
  text_add(&text, "jaxmpi: rank %d has never waited for ", runtime.rank);
  summary_describe(&text, request->summary);
  summary_add_call_sites(&text, ", called at ", request->summary);
  fprintf(stderr, "%s\n", text.characters);
}

/* Return whether MPI calls a user's reduction function for the request. */
static bool is_user_reduction(const struct request *request) {
  int op = attribute_of(request->operation, KIND_REDUCTION);
  return op >= 0 && ((const struct reduction *)object_of(request->attributes[op]))->by == REDUCER_USER;
}

/* How many requests with user's reductions are under way. */
static int64_t user_reductions_under_way(void) {
  int64_t count = 0;
  if (runtime_has_ended()) return 0;
  if (runtime.serialize) pthread_mutex_lock(&runtime.lock);
  pthread_mutex_lock(&all.lock);
  for (int i = 0; i < all.used; i++)
    if (all.places[i] != NULL && is_user_reduction(all.places[i])) count += runtime.abi->test_request(all.places[i]);
  pthread_mutex_unlock(&all.lock);
  if (runtime.serialize) pthread_mutex_unlock(&runtime.lock);
  return count;
}

static void name_all(void) {
  int64_t named = 0;
  pthread_mutex_lock(&all.lock);
  for (int i = 0; i < all.used && named < MOST_NAMED; i++)
    if (all.places[i] != NULL) name_request(all.places[i]), named++;
  if (all.in_flight > named)
    fprintf(stderr, "jaxmpi: rank %d has never waited for %" PRId64 " more request%s\n", runtime.rank,
            all.in_flight - named, all.in_flight - named > 1 ? "s" : "");
  pthread_mutex_unlock(&all.lock);
}

int64_t requests_finish(void) {
  static atomic_bool named_already;
  if (atomic_load(&all.process) != getpid()) return 0;
  progress_end();
  progress_join();
  bool again = atomic_exchange(&named_already, true);
  if (!again) name_all();
  int64_t under_way = user_reductions_under_way();
  for (int i = 0; !again && under_way > 0 && i < MILLISECONDS_AT_END; i++) {
    nanosleep(&(struct timespec){0, 1000000}, NULL);
    under_way = user_reductions_under_way();
  }
  return under_way;
}
