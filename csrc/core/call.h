/* A call of an operation, with the buffers that it has on this rank. Threads: a call belongs to the thread that
 * executes it, and moves with it; the functions are pure. */
#ifndef JAXMPI_CALL_H
#define JAXMPI_CALL_H

#include "base/ffi.h"
#include "base/memory.h"
#include "core/objects.h"
#include "core/operation.h"

/* A buffer that this rank passes to an operation or receives from it. The user of the buffer by role (MPI or the core)
 * can dereference `data`, in whichever memory it lies. `data`, `count` and `type` are zero where this rank does not
 * pass the buffer. */
struct buffer {
  void *data;
  int64_t count;
  const struct datatype *type;
  enum role role;
};

/* The element at `index`. An empty buffer may be at NULL, to which C forbids adding even 0. */
static inline void *buffer_at(const struct buffer *buffer, int64_t index) {
  return index == 0 ? buffer->data : (char *)buffer->data + (size_t)index * buffer->type->bytes;
}

static inline size_t buffer_bytes(const struct buffer *buffer) {
  return buffer->count == 0 ? 0 : (size_t)buffer->count * buffer->type->bytes;
}

/* How a call is divided into MPI calls. Each of MPI's buffers is a matrix with one row, or with one row per rank; a
 * chunk is a range of columns, the same in all of MPI's buffers. */
struct division {
  int64_t columns, chunk;      /* in all, and per chunk; chunk >= columns: a single chunk */
  int rows_read, rows_written; /* of buffers of these roles */
};
static inline bool division_is_one(const struct division *division) { return division->columns <= division->chunk; }

/* One call of an operation, from the frame to the body. Copied by call_copy, because most of `buffers` is unused. */
struct call {
  const ffi_frame *frame; /* NULL after the handler has returned: an error is then deferred */
  const struct operation *operation;
  struct communicator *comm;
  const struct memory *memory; /* that MPI's buffers lie in */
  void *stream;                /* XLA's; NULL for the host */
  void *context;               /* of the stream, if NCCL carries the call */
  const struct call *leaves;   /* of a call with joined buffers: as XLA made it; NULL otherwise */
  const char *function;        /* MPI function, for errors and the log */
  struct division division;
  enum reducer reducer; /* REDUCER_MPI if the operation is not a reduction */
  bool by_nccl;         /* NCCL carries it, and MPI does not: call_is_by_nccl */
  bool labelled;        /* if a message: a label with the contents goes along */
  bool sending;         /* a message of this rank is under way; it must be received before the call returns */
  bool reads_envelope;  /* ranks and tags are still to be read from the last buffers */
  struct {
    bool due;                    /* with the calls of other ranks, before anything is sent: execute/compare.h */
    bool written;                /* the share is data that this rank receives */
    int64_t share;               /* elements of this rank's share, over all chunks */
    const struct datatype *type; /* of the share */
  } comparison;
  struct {
    bool on;
    uint64_t number;
    double start; /* by seconds_now */
  } log;
  struct {
    int from, tag;   /* sender and tag of the message that was received; `from` is -1 without one */
    int64_t request; /* that the call started or waited for; 0 without one */
  } timeline;
  int64_t attributes[MAX_ATTRIBUTES]; /* the number of an object is replaced by the address: see object_of */
  /* Row i of the operation's buffers has buffers[first[i]] to buffers[first[i + 1] - 1]. */
  short first[MAX_ROLES + 1];
  short buffer_count;
  struct buffer buffers[MAX_BUFFERS];
};

/* Copy the part of a call that is in use. */
static inline void call_copy(struct call *to, const struct call *from) {
  memcpy(to, from, offsetof(struct call, buffers) + (size_t)from->buffer_count * sizeof *from->buffers);
}

/* The leaves of a joined buffer. */
static inline const struct buffer *leaves_of(const struct call *call, int buffer, int *count) {
  const struct call *leaves = call->leaves;
  *count = leaves->first[buffer + 1] - leaves->first[buffer];
  return &leaves->buffers[leaves->first[buffer]];
}

/* The name that users know. */
static inline const char *call_name(const struct call *call) {
  return operation_name(call->operation, call->attributes);
}

/* The object that an attribute refers to; NULL if none. */
static inline void *object_of(int64_t attribute) { return (void *)(intptr_t)attribute; }

#endif
