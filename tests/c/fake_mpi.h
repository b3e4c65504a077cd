/* A fake MPI library: with it the core is tested without MPI, without other processes, and for each ABI.
 *
 * fake_mpi.c is compiled once per header of csrc/mpi/abi into a shared library, which a test opens like a real one. A
 * test sees it through the structure below, which is the same for each ABI; handles are intptr_t as in core.h.
 *
 * One process plays one rank of a communicator of any size. The other ranks follow rules:
 *   allgather, gather, alltoall   rank r passes what this rank passes, with r - rank added to each byte (modulo 256);
 *                                 in an allgather, if `alike` is set, the same as this rank
 *   bcast, scatter                another root sends fake_byte(root, 0), fake_byte(root, 1), ...
 *   with counts                   another rank sends fake_byte(rank, 0), fake_byte(rank, 1), ...; of parts that must
 *                                 follow each other without gaps
 *   reductions                    all ranks pass the same; a predefined operation adds to each byte the number of ranks
 *                                 that take part, one made by Op_create is called once for each further rank
 *   send                          to oneself: queued; to others: only recorded. `deliver` queues messages of others
 *   what starts                   is done once a Wait, or a Test, ends it: then results appear where they were asked
 *                                 for, and what is sent must still be where it was
 * It is strict where MPI libraries differ: operand and result must be different buffers, types must be committed and
 * free of holes, and a receive that truncates writes the whole message, as the worst libraries do. A call that would
 * wait for ever returns an error.
 */
#ifndef JAXMPI_FAKE_MPI_H
#define JAXMPI_FAKE_MPI_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FAKE_CALLS = 256, FAKE_WOULD_WAIT = 41 };

/* One call of an MPI function with its arguments. Members for which the function has no argument are 0. */
struct fake_call {
  const char *_Atomic name; /* "MPI_Bcast"; a test may look while another thread calls */
  const void *in;           /* what is read; the buffer of a broadcast is both */
  void *out;
  int in_count, out_count;
  intptr_t in_type, out_type, op, comm;
  int64_t in_bytes, out_bytes; /* count times size of the type */
  int peer, tag;               /* peer: root, destination or source */
};

struct fake_control {
  /* This ABI. */
  int any_source, any_tag, proc_null;
  void *in_place;
  size_t status_bytes;

  /* Since the last reset. */
  struct fake_call calls[FAKE_CALLS]; /* oldest first; further ones are only counted */
  atomic_int call_count;
  int live_types, live_operations, live_groups; /* made and not freed; operations are never reset */
  atomic_int live_requests;
  atomic_int live_matched; /* probed and not received */
  atomic_int queued;       /* sent and not probed */
  int most_inside;         /* most threads in MPI at one time, with linger_ms */

  /* Switches, off after a reset. */
  bool hollow;          /* no buffer is touched, so that counts may be huge and pointers invalid */
  bool alike;           /* in an allgather all ranks pass the same */
  atomic_int linger_ms; /* how long a call that communicates waits for a second thread to enter MPI */
  bool (*enough)(void); /* whether it has waited long enough; NULL: it has not */
  atomic_int slow;      /* calls of Test that find a request started from now on still under way */
  bool backwards;       /* as one request ends, messages come to all that expect one, from the last to the first */
  atomic_int unheard;   /* calls of Improbe and Iprobe from now on that find nothing yet */

  /* How the library describes itself; not reset. */
  const char *version;
  int version_code; /* returned by MPI_Get_library_version */
  int abi_major;

  void (*reset)(void);
  intptr_t (*comm_new)(int rank, int size); /* may have the handle of one that was freed */
  intptr_t (*comm_dup)(intptr_t comm);
  void (*comm_free)(intptr_t comm);
  intptr_t (*datatype)(const char *name, size_t *bytes); /* "INT8_T"; 0 where there is none */
  intptr_t (*operation)(const char *name);               /* "SUM" */
  int (*operation_free)(intptr_t op);                    /* of a user-made operation; 0, or an error */
  /* Calls a user's operation: inout = in op inout. */
  void (*apply)(intptr_t op, void *in, void *inout, int count);
  /* The nth call of this function from now on (1: the next) returns `code` and does nothing. */
  void (*fail)(const char *function, int nth, int code);
  /* Queues a message from `source`; `data` is copied, NULL: the message has a size and no content. */
  void (*deliver)(intptr_t comm, int source, int tag, const void *data, int64_t bytes);
  void (*status)(const void *status, int *source, int *tag, int64_t *bytes);
};

/* Byte `k` of the data that another rank sends as root. */
static inline uint8_t fake_byte(int rank, int64_t k) { return (uint8_t)(37 * rank + 5 * k + 11); }

#endif
