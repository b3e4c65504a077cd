#include "fake_objects.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { COMMS = 64, ATTRIBUTES = 256, KEYVALS = 64, TYPES = 64, OPERATIONS = 64, MESSAGES = 64, REQUESTS = 256 };
enum { GROUPS = 8 };

/* Numbers that differ between the ABIs and that csrc/mpi/abi does not need; where the status keeps the size. */
static const struct traits {
  const char *abi, *version;
  int any_source, any_tag, abi_major;
  size_t status_offset;
} traits[] = {
    {"openmpi", "Open MPI v0 fake", -1, -1, -1, 16},
    {"mpich", "MPICH Version: 0 fake", -2, -1, -1, 0},
    {"mpiabi", "MPICH Version: 0 fake", -1, -2, 1, 12},
};
static const struct traits *trait;

/* --- the record of calls, and errors on demand --- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the record; no function waits with it */
static struct {
  const char *function;
  int nth, code;
} failure;
static atomic_int inside;

int fake_begin(const char *name, struct fake_call **call) {
  static _Thread_local struct fake_call unkept;
  int code = MPI_SUCCESS, number;
  pthread_mutex_lock(&lock);
  number = fake_control.call_count++;
  *call = number < FAKE_CALLS ? &fake_control.calls[number] : &unkept;
  memset(&(*call)->in, 0, sizeof **call - offsetof(struct fake_call, in));
  (*call)->name = name;
  if (failure.function != NULL && strcmp(failure.function, name) == 0 && --failure.nth == 0) {
    code = failure.code;
    failure.function = NULL;
  }
  pthread_mutex_unlock(&lock);
  return code;
}

static void linger(void) {
  int now = atomic_fetch_add(&inside, 1) + 1;
  bool met = false;
  for (int ms = 0; ms < fake_control.linger_ms && !met; ms++) {
    pthread_mutex_lock(&lock);
    if (now > fake_control.most_inside) fake_control.most_inside = now;
    met = fake_control.most_inside > 1 || (fake_control.enough != NULL && fake_control.enough());
    pthread_mutex_unlock(&lock);
    if (!met) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  }
  atomic_fetch_sub(&inside, 1);
}

int fake_begin_on(const char *name, MPI_Comm handle, struct fake_call **call, struct comm **comm) {
  int code = fake_begin(name, call);
  (*call)->comm = (intptr_t)handle;
  *comm = fake_comm(handle);
  if (code == MPI_SUCCESS && *comm == NULL) code = FAKE_ERR_COMM;
  if (fake_control.linger_ms > 0) linger();
  return code;
}

/* --- communicators and their attributes --- */

static struct comm comms[COMMS];
static struct keyval {
  MPI_Comm_copy_attr_function *copy;
  MPI_Comm_delete_attr_function *delete;
  void *extra;
} keyvals[KEYVALS];
static int keyval_count;
/* A value stays here when its communicator is freed: it must not look leaked, for it is meant to last. */
static struct kept {
  intptr_t comm;
  int key;
  bool live;
  void *value;
} attributes[ATTRIBUTES];
static int attribute_count;

struct comm *fake_comm(MPI_Comm handle) {
  intptr_t place = FAKE_PLACE(KIND_COMM, handle);
  return place >= 0 && place < COMMS && comms[place].live ? &comms[place] : NULL;
}

static intptr_t comm_new(int rank, int size) {
  int place = 0;
  while (place < COMMS - 1 && comms[place].live) place++;
  comms[place] = (struct comm){.live = true, .rank = rank, .size = size};
  return FAKE_HANDLE(KIND_COMM, place);
}

static void comm_free(intptr_t comm) {
  for (int i = 0; i < attribute_count; i++)
    if (attributes[i].live && attributes[i].comm == comm) {
      int key = attributes[i].key;
      keyvals[key].delete((MPI_Comm)comm, key, attributes[i].value, keyvals[key].extra);
      attributes[i].live = false;
    }
  fake_comm((MPI_Comm)comm)->live = false;
}

int MPI_Comm_create_keyval(MPI_Comm_copy_attr_function *copy, MPI_Comm_delete_attr_function *delete, int *keyval,
                           void *extra) {
  CALL(Comm_create_keyval);
  if (copy == NULL || delete == NULL || keyval_count == KEYVALS) return FAKE_ERR_ARG;
  keyvals[keyval_count] = (struct keyval){copy, delete, extra};
  *keyval = keyval_count++;
  return MPI_SUCCESS;
}

static int set_attribute(intptr_t comm, int key, void *value) {
  if (attribute_count == ATTRIBUTES) return FAKE_ERR_FULL;
  attributes[attribute_count++] = (struct kept){comm, key, true, value};
  return MPI_SUCCESS;
}

int MPI_Comm_set_attr(MPI_Comm comm, int key, void *value) {
  CALL(Comm_set_attr);
  if (fake_comm(comm) == NULL) return FAKE_ERR_COMM;
  if (key < 0 || key >= keyval_count) return FAKE_ERR_ARG;
  return set_attribute((intptr_t)comm, key, value);
}

static intptr_t comm_dup(intptr_t comm) {
  const struct comm *old = fake_comm((MPI_Comm)comm);
  intptr_t made = comm_new(old->rank, old->size);
  for (int i = 0, count = attribute_count; i < count; i++) {
    int key = attributes[i].key, flag = 1;
    void *copy = NULL;
    if (!attributes[i].live || attributes[i].comm != comm) continue;
    int code = keyvals[key].copy((MPI_Comm)comm, key, keyvals[key].extra, attributes[i].value, &copy, &flag);
    if (code == MPI_SUCCESS && flag) set_attribute(made, key, copy);
  }
  return made;
}

int MPI_Comm_get_attr(MPI_Comm comm, int key, void *value, int *flag) {
  CALL(Comm_get_attr);
  if (fake_comm(comm) == NULL) return FAKE_ERR_COMM;
  *flag = 0;
  for (int i = 0; i < attribute_count; i++)
    if (attributes[i].live && attributes[i].comm == (intptr_t)comm && attributes[i].key == key) {
      memcpy(value, &attributes[i].value, sizeof(void *));
      *flag = 1;
    }
  return MPI_SUCCESS;
}

/* --- groups --- */

static struct {
  bool live;
  int size, ranks[GROUPS];
} groups[GROUPS];

static MPI_Group group_new(int size) {
  int place = 0;
  while (place < GROUPS - 1 && groups[place].live) place++;
  groups[place].live = true;
  groups[place].size = size;
  fake_control.live_groups++;
  return (MPI_Group)FAKE_HANDLE(KIND_GROUP, place);
}

static int group_place(MPI_Group group) {
  intptr_t place = FAKE_PLACE(KIND_GROUP, group);
  return place >= 0 && place < GROUPS && groups[place].live ? (int)place : -1;
}

int MPI_Comm_group(MPI_Comm handle, MPI_Group *group) {
  BEGIN(Comm_group);
  *group = group_new(comm->size);
  for (int i = 0; i < comm->size; i++) groups[group_place(*group)].ranks[i] = i;
  return MPI_SUCCESS;
}

int MPI_Group_incl(MPI_Group group, int n, const int ranks[], MPI_Group *result) {
  CALL(Group_incl);
  int place = group_place(group);
  if (place < 0 || n > GROUPS) return FAKE_ERR_ARG;
  for (int i = 0; i < n; i++)
    if (ranks[i] < 0 || ranks[i] >= groups[place].size) return FAKE_ERR_RANK;
  *result = group_new(n);
  memcpy(groups[group_place(*result)].ranks, ranks, (size_t)n * sizeof *ranks);
  return MPI_SUCCESS;
}

int MPI_Group_free(MPI_Group *group) {
  CALL(Group_free);
  int place = group_place(*group);
  if (place < 0) return FAKE_ERR_ARG;
  groups[place].live = false;
  fake_control.live_groups--;
  return MPI_SUCCESS;
}

int MPI_Comm_create_group(MPI_Comm handle, MPI_Group group, int tag, MPI_Comm *result) {
  BEGIN(Comm_create_group);
  int place = group_place(group), rank = 0;
  if (place < 0 || tag < 0) return FAKE_ERR_ARG;
  while (rank < groups[place].size && groups[place].ranks[rank] != comm->rank) rank++;
  if (rank == groups[place].size) return FAKE_ERR_RANK;
  *result = (MPI_Comm)comm_new(rank, groups[place].size);
  return MPI_SUCCESS;
}

/* --- datatypes --- */

static struct type types[TYPES];
static const struct {
  const char *name;
  int64_t bytes;
} predefined[] = {
    {"C_BOOL", 1},   {"INT8_T", 1},   {"INT16_T", 2},  {"INT32_T", 4},         {"INT64_T", 8},          {"UINT8_T", 1},
    {"UINT16_T", 2}, {"UINT32_T", 4}, {"UINT64_T", 8}, {"FLOAT", 4},           {"DOUBLE", 8},           {"BYTE", 1},
    {"CHAR", 1},     {"INT", 4},      {"LONG", 8},     {"C_FLOAT_COMPLEX", 8}, {"C_DOUBLE_COMPLEX", 16}};
enum { PREDEFINED = sizeof predefined / sizeof *predefined };

struct type *fake_type(MPI_Datatype handle) {
  intptr_t place = FAKE_PLACE(KIND_TYPE, handle);
  return place >= 0 && place < TYPES && types[place].live ? &types[place] : NULL;
}

static intptr_t datatype(const char *name, size_t *bytes) {
  for (int i = 0; i < PREDEFINED; i++)
    if (strcmp(predefined[i].name, name) == 0) {
      *bytes = (size_t)predefined[i].bytes;
      return FAKE_HANDLE(KIND_TYPE, i);
    }
  return 0;
}

static int new_type(int64_t bytes, int64_t element, MPI_Datatype *result) {
  for (int i = PREDEFINED; i < TYPES; i++)
    if (!types[i].live) {
      types[i] = (struct type){.live = true, .derived = true, .bytes = bytes, .element = element};
      fake_control.live_types++;
      *result = (MPI_Datatype)FAKE_HANDLE(KIND_TYPE, i);
      return MPI_SUCCESS;
    }
  return FAKE_ERR_FULL;
}

int MPI_Type_contiguous(int count, MPI_Datatype old, MPI_Datatype *result) {
  CALL(Type_contiguous);
  const struct type *type = fake_type(old);
  if (type == NULL) return FAKE_ERR_TYPE;
  if (count < 0) return FAKE_ERR_COUNT;
  return new_type(count * type->bytes, type->element, result);
}

int MPI_Type_create_struct(int count, const int lengths[], const MPI_Aint offsets[], const MPI_Datatype old[],
                           MPI_Datatype *result) {
  CALL(Type_create_struct);
  int64_t bytes = 0, element = 0;
  for (int i = 0; i < count; i++) {
    const struct type *type = fake_type(old[i]);
    if (type == NULL) return FAKE_ERR_TYPE;
    if (lengths[i] < 0) return FAKE_ERR_COUNT;
    if (offsets[i] != bytes) return FAKE_ERR_ARG; /* a hole, or an overlap */
    bytes += lengths[i] * type->bytes;
    element = type->element;
  }
  return new_type(bytes, element, result);
}

int MPI_Type_commit(MPI_Datatype *handle) {
  CALL(Type_commit);
  struct type *type = fake_type(*handle);
  if (type == NULL || !type->derived) return FAKE_ERR_TYPE;
  type->committed = true;
  return MPI_SUCCESS;
}

int MPI_Type_free(MPI_Datatype *handle) {
  CALL(Type_free);
  struct type *type = fake_type(*handle);
  if (type == NULL || !type->derived) return FAKE_ERR_TYPE;
  type->live = false;
  fake_control.live_types--;
  *handle = (MPI_Datatype)(intptr_t)0;
  return MPI_SUCCESS;
}

static int check_buffer(const void *data, int count, MPI_Datatype handle, int64_t *bytes) {
  const struct type *type = fake_type(handle);
  if (count < 0) return FAKE_ERR_COUNT;
  if (type == NULL || !type->committed) return FAKE_ERR_TYPE;
  *bytes = count * type->bytes;
  return data == NULL && *bytes > 0 ? FAKE_ERR_BUFFER : MPI_SUCCESS;
}

int fake_reads(struct fake_call *call, const void *data, int count, MPI_Datatype type) {
  call->in = data, call->in_count = count, call->in_type = (intptr_t)type;
  return check_buffer(data, count, type, &call->in_bytes);
}

int fake_writes(struct fake_call *call, void *data, int count, MPI_Datatype type) {
  call->out = data, call->out_count = count, call->out_type = (intptr_t)type;
  return check_buffer(data, count, type, &call->out_bytes);
}

/* --- reductions --- */

static const char *const operation_names[] = {"SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "BAND", "BOR"};
enum { NAMED = sizeof operation_names / sizeof *operation_names };
static MPI_User_function *operations[OPERATIONS]; /* NULL: predefined, or none */

static intptr_t operation(const char *name) {
  for (int i = 0; i < NAMED; i++)
    if (strcmp(operation_names[i], name) == 0) return FAKE_HANDLE(KIND_OP, i);
  return 0;
}

int MPI_Op_create(MPI_User_function *function, int commutes, MPI_Op *result) {
  CALL(Op_create);
  if (function == NULL || commutes != 1) return FAKE_ERR_ARG;
  for (int i = NAMED; i < OPERATIONS; i++)
    if (operations[i] == NULL) {
      operations[i] = function;
      fake_control.live_operations++;
      *result = (MPI_Op)FAKE_HANDLE(KIND_OP, i);
      return MPI_SUCCESS;
    }
  return FAKE_ERR_FULL;
}

static int operation_free(intptr_t op) {
  intptr_t place = FAKE_PLACE(KIND_OP, op);
  if (place < NAMED || place >= OPERATIONS || operations[place] == NULL) return FAKE_ERR_OP;
  operations[place] = NULL;
  fake_control.live_operations--;
  return MPI_SUCCESS;
}

int MPI_Op_free(MPI_Op *op) {
  CALL(Op_free);
  return operation_free((intptr_t)*op);
}

static void apply(intptr_t op, void *in, void *inout, int count) {
  MPI_Datatype type = (MPI_Datatype)(intptr_t)0; /* the core's functions know their own */
  operations[FAKE_PLACE(KIND_OP, op)](in, inout, &count, &type);
}

int fake_reduce(MPI_Op handle, const void *in, void *out, int count, MPI_Datatype type, int times) {
  intptr_t place = FAKE_PLACE(KIND_OP, handle);
  if (place < 0 || place >= OPERATIONS || (place >= NAMED && operations[place] == NULL)) return FAKE_ERR_OP;
  if (fake_type(type)->derived) return FAKE_ERR_OP;
  int64_t bytes = count * fake_type(type)->bytes;
  if (fake_control.hollow || bytes == 0) return MPI_SUCCESS;
  unsigned char *mine = malloc((size_t)bytes), *result = out;
  if (mine == NULL) return FAKE_ERR_FULL;
  memcpy(mine, in == ABI_IN_PLACE ? out : in, (size_t)bytes);
  memcpy(result, mine, (size_t)bytes);
  for (int64_t i = 0; place < NAMED && i < bytes; i++) result[i] = (unsigned char)(mine[i] + times);
  for (int i = 1; place >= NAMED && i < times; i++) operations[place](mine, result, &count, &type);
  free(mine);
  return MPI_SUCCESS;
}

/* --- messages --- */

static struct message messages[MESSAGES];

struct message *fake_message(int place) {
  return place >= 0 && place < MESSAGES && messages[place].state == MATCHED ? &messages[place] : NULL;
}

static int enqueue(struct message message) {
  static uint64_t order;
  int place = 0;
  while (place < MESSAGES && messages[place].state != GONE) place++;
  if (place == MESSAGES) return FAKE_ERR_FULL;
  message.order = order++;
  messages[place] = message;
  fake_control.queued++;
  return MPI_SUCCESS;
}

int fake_enqueue(intptr_t comm, int source, int tag, const void *data, int64_t bytes) {
  struct message message = {.state = QUEUED, .comm = comm, .source = source, .tag = tag, .bytes = bytes};
  if (data != NULL && !fake_control.hollow) {
    message.data = malloc((size_t)bytes + 1);
    if (message.data == NULL) return FAKE_ERR_FULL;
    memcpy(message.data, data, (size_t)bytes);
  }
  pthread_mutex_lock(&lock);
  int code = enqueue(message);
  pthread_mutex_unlock(&lock);
  if (code != MPI_SUCCESS) free(message.data);
  return code;
}

static void deliver(intptr_t comm, int source, int tag, const void *data, int64_t bytes) {
  fake_enqueue(comm, source, tag, data, bytes);
}

static struct message *first_fitting(MPI_Comm comm, int source, int tag) {
  struct message *found = NULL;
  for (int i = 0; i < MESSAGES; i++) {
    struct message *message = &messages[i];
    if (message->state != QUEUED || message->comm != (intptr_t)comm) continue;
    if (source != trait->any_source && source != message->source) continue;
    if (tag != trait->any_tag && tag != message->tag) continue;
    if (found == NULL || message->order < found->order) found = message;
  }
  return found;
}

bool fake_match(MPI_Comm comm, int source, int tag, bool look, int *place, MPI_Status *status) {
  pthread_mutex_lock(&lock);
  struct message *found = first_fitting(comm, source, tag);
  if (found != NULL) {
    *place = (int)(found - messages);
    fake_set_status(status, found->source, found->tag, found->bytes);
  }
  if (found != NULL && !look) {
    found->state = MATCHED;
    fake_control.queued--;
    fake_control.live_matched++;
  }
  pthread_mutex_unlock(&lock);
  return found != NULL;
}

void fake_drop(struct message *matched) {
  pthread_mutex_lock(&lock);
  free(matched->data);
  *matched = (struct message){.state = GONE};
  fake_control.live_matched--;
  pthread_mutex_unlock(&lock);
}

/* --- requests --- */

static struct started {
  bool live;
  int slow; /* how many tests find it under way */
  const void *in;
  void *out, *sent, *result; /* copies, NULL: none; of what is read, and of what will be written */
  int64_t in_bytes, out_bytes;
  bool expects, cancelled; /* a message of the communicator, from `source` with `tag`, for `out` */
  intptr_t comm;
  int source, tag;
  bool arrived; /* it has been written */
  int code;
  MPI_Status status;
} requests[REQUESTS];

void *fake_copy(const void *data, int64_t bytes) {
  void *copy = data != NULL && data != ABI_IN_PLACE && bytes > 0 && !fake_control.hollow ? malloc((size_t)bytes) : NULL;
  if (copy != NULL) memcpy(copy, data, (size_t)bytes);
  return copy;
}

static int keep_request(struct started *made, MPI_Request *request) {
  int place = 0;
  pthread_mutex_lock(&lock);
  while (place < REQUESTS && requests[place].live) place++;
  if (place < REQUESTS) requests[place] = *made;
  pthread_mutex_unlock(&lock);
  if (place == REQUESTS) {
    free(made->sent), free(made->result);
    return FAKE_ERR_FULL;
  }
  fake_control.live_requests++;
  *request = (MPI_Request)FAKE_HANDLE(KIND_REQUEST, place + 1);
  return MPI_SUCCESS;
}

int fake_request(const struct fake_call *call, void *before, MPI_Request *request) {
  struct started made = {.live = true, .slow = fake_control.slow, .in = call->in, .in_bytes = call->in_bytes};
  if (before != NULL) {
    made.out = call->out, made.out_bytes = call->out_bytes;
    made.result = fake_copy(call->out, call->out_bytes);
    memcpy(call->out, before, (size_t)call->out_bytes);
    free(before);
  }
  if (call->in != call->out) made.sent = fake_copy(call->in, call->in_bytes);
  return keep_request(&made, request);
}

int fake_expect(const struct fake_call *call, MPI_Request *request) {
  struct started made = {.live = true, .slow = fake_control.slow, .out = call->out, .out_bytes = call->out_bytes};
  made.expects = true, made.comm = call->comm, made.source = call->peer, made.tag = call->tag;
  return keep_request(&made, request);
}

static void forget_request(struct started *request) {
  free(request->sent), free(request->result);
  *request = (struct started){.live = false};
}

static struct started *find_request(MPI_Request request) {
  intptr_t place = FAKE_PLACE(KIND_REQUEST, request) - 1;
  return place >= 0 && place < REQUESTS && requests[place].live ? &requests[place] : NULL;
}

int fake_cancel(const MPI_Request *request) {
  pthread_mutex_lock(&lock);
  struct started *cancelled = find_request(*request);
  bool can = cancelled != NULL && cancelled->expects;
  if (can) cancelled->cancelled = true;
  pthread_mutex_unlock(&lock);
  return can ? MPI_SUCCESS : FAKE_ERR_ARG;
}

/* Writes the whole message, also where it is too long. */
static void arrive(struct started *expecting) {
  if (expecting->arrived) return;
  struct message *found = first_fitting((MPI_Comm)expecting->comm, expecting->source, expecting->tag);
  if (found == NULL) return;
  expecting->arrived = true;
  expecting->code = found->bytes > expecting->out_bytes ? FAKE_ERR_TRUNCATE : MPI_SUCCESS;
  fake_set_status(&expecting->status, found->source, found->tag, found->bytes);
  if (found->data != NULL && found->bytes > 0) memcpy(expecting->out, found->data, (size_t)found->bytes);
  free(found->data);
  *found = (struct message){.state = GONE};
  fake_control.queued--;
}

static int receive_expected(struct started *expecting, MPI_Status *status) {
  for (int i = REQUESTS - 1; i >= 0 && fake_control.backwards; i--)
    if (requests[i].live && requests[i].expects) arrive(&requests[i]);
  arrive(expecting);
  if (!expecting->arrived) return expecting->cancelled ? MPI_SUCCESS : FAKE_WOULD_WAIT;
  *status = expecting->status;
  return expecting->code;
}

int fake_end(MPI_Request *request, bool test, int *done, MPI_Status *status) {
  int code = MPI_SUCCESS;
  *done = 1;
  fake_set_status(status, trait->any_source, trait->any_tag, 0);
  if (*request == (MPI_Request)(intptr_t)0) return MPI_SUCCESS; /* of a test that found it done */
  pthread_mutex_lock(&lock);
  struct started *ended = find_request(*request);
  if (ended == NULL) {
    code = FAKE_ERR_ARG;
  } else if (test && ended->slow > 0) {
    if (ended->slow > 0) ended->slow--;
    *done = 0;
  } else if (ended->expects && (code = receive_expected(ended, status)) == FAKE_WOULD_WAIT) {
    *done = 0;
    if (test) code = MPI_SUCCESS;
  } else {
    if (ended->sent != NULL && memcmp(ended->sent, ended->in, (size_t)ended->in_bytes) != 0) code = FAKE_ERR_BUFFER;
    if (ended->result != NULL) memcpy(ended->out, ended->result, (size_t)ended->out_bytes);
    forget_request(ended);
    *request = (MPI_Request)(intptr_t)0;
    fake_control.live_requests--;
  }
  pthread_mutex_unlock(&lock);
  return code;
}

void fake_set_status(MPI_Status *status, int source, int tag, int64_t bytes) {
  status->MPI_SOURCE = source;
  status->MPI_TAG = tag;
  memcpy((char *)status + trait->status_offset, &bytes, sizeof bytes);
}

int64_t fake_status_bytes(const MPI_Status *status) {
  int64_t bytes;
  memcpy(&bytes, (const char *)status + trait->status_offset, sizeof bytes);
  return bytes;
}

/* --- control --- */

static void read_status(const void *status, int *source, int *tag, int64_t *bytes) {
  MPI_Status copy;
  memcpy(&copy, status, sizeof copy);
  *source = copy.MPI_SOURCE;
  *tag = copy.MPI_TAG;
  *bytes = fake_status_bytes(&copy);
}

static void fail(const char *function, int nth, int code) {
  pthread_mutex_lock(&lock);
  failure.function = function;
  failure.nth = nth;
  failure.code = code;
  pthread_mutex_unlock(&lock);
}

static void reset(void) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MESSAGES; i++) {
    free(messages[i].data);
    messages[i] = (struct message){.state = GONE};
  }
  for (int i = 0; i < REQUESTS; i++) forget_request(&requests[i]);
  for (int i = PREDEFINED; i < TYPES; i++) types[i].live = false;
  failure.function = NULL;
  memset(fake_control.calls, 0, sizeof fake_control.calls);
  fake_control.call_count = fake_control.live_requests = fake_control.live_matched = fake_control.queued = 0;
  fake_control.live_types = fake_control.most_inside = fake_control.linger_ms = 0;
  fake_control.enough = NULL;
  fake_control.slow = fake_control.unheard = 0;
  fake_control.hollow = fake_control.backwards = false;
  pthread_mutex_unlock(&lock);
}

struct fake_control fake_control = {
    .proc_null = ABI_PROC_NULL,
    .in_place = ABI_IN_PLACE,
    .status_bytes = sizeof(MPI_Status),
    .reset = reset,
    .comm_new = comm_new,
    .comm_dup = comm_dup,
    .comm_free = comm_free,
    .datatype = datatype,
    .operation = operation,
    .operation_free = operation_free,
    .apply = apply,
    .fail = fail,
    .deliver = deliver,
    .status = read_status,
};

#define STRING2(name) #name
#define STRING(name)  STRING2(name)

__attribute__((constructor)) static void prepare(void) {
  for (size_t i = 0; i < sizeof traits / sizeof *traits; i++)
    if (strcmp(traits[i].abi, STRING(ABI_NAME)) == 0) trait = &traits[i];
  fake_control.any_source = trait->any_source;
  fake_control.any_tag = trait->any_tag;
  fake_control.abi_major = trait->abi_major;
  fake_control.version = trait->version;
  for (int i = 0; i < PREDEFINED; i++)
    types[i] =
        (struct type){.live = true, .committed = true, .bytes = predefined[i].bytes, .element = predefined[i].bytes};
}
