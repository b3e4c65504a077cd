/* Plans: which parts of the arrays of a call travel in which messages. Made once, by python/jaxmpi/_mpi/plans.py, and
 * kept in the registry.
 *
 * A plan describes a linear map between the arrays of all ranks. This rank's results are its operands (or zero), except
 * in some boxes. Some boxes are filled with a constant. Others receive boxes of other ranks: the message replaces the
 * elements, or, in the adjoint of a map like this, is added to them. Other reductions can combine messages and
 * elements, too, in an order that the plan defines. All messages to a rank are one message, and all boxes are read
 * before any is written.
 *
 * Messages are composed and unpacked in the plan's `stage`: first the messages sent, then the messages received. A
 * message of a rank to itself is read where it was composed. In one call on the host it is copied from an operand to a
 * result, if these are never the same memory. Each message begins with a label, by which the receiver checks whether it
 * is the message that the plan expects.
 *
 * Threads: plan_make is called under the GIL. A plan is never freed, and only its trials change. The thread that calls
 * MPI for a call calls the other functions, and uses the buffers of that call, on the host.
 */
#ifndef JAXMPI_PLAN_H
#define JAXMPI_PLAN_H

#include <string.h>

#include "base/trial.h"
#include "core/box.h"
#include "core/call.h"
#include "core/runtime.h"

/* The tags of the messages of plans, and of their notices; see _mpi/tags.py. Tags from derivatives_tag on may be tags
 * of derivatives: _FIRST there. */
static inline int plans_tag(void) { return runtime.most_tag - runtime.most_tag / 2 - 2; }
static inline int notices_tag(void) { return plans_tag() - 1; }
static inline int derivatives_tag(void) { return plans_tag() + 2; }
static inline bool is_of_plans(int tag) { return tag == plans_tag() || tag == notices_tag(); }
/* Users may not use these tags: the last one is for messages that only derivatives send (tags.py). */
static inline bool is_kept(int tag) { return tag >= notices_tag() && tag < derivatives_tag(); }

struct peer {
  int rank;
  int64_t stage, bytes; /* of the message, with the label */
  bool streams;         /* it may be composed by stores that bypass the cache */
};

/* The numbers with which the description of a plan begins, in this order: see plan_make. */
#define PLAN_HEADER(NUMBER) \
  NUMBER(signature)         \
  NUMBER(arrays)            \
  NUMBER(combines)          \
  NUMBER(begin)             \
  NUMBER(sent)              \
  NUMBER(received)          \
  NUMBER(send_count)        \
  NUMBER(receive_count)     \
  NUMBER(pack_count)        \
  NUMBER(fill_count)        \
  NUMBER(unpack_count)      \
  NUMBER(pair_count)

/* How results begin: as the operands, as zero, or uninitialized, because boxes cover all of them. AS_MESSAGES: there
 * are no boxes, because XLA composes the messages and takes them apart. The operand of the call is the part of the
 * stage that is sent, and labels are written into it. The result is the end of the stage: what is received, and before
 * it, of an exchange that is started, what the rank sends to itself. The call that waits for it has no operand. */
enum { BEGINS_AS_OPERANDS, BEGINS_AS_ZERO, BEGINS_COVERED, BEGINS_AS_MESSAGES };

struct plan {
  uint64_t signature;        /* the same on all ranks that make the same call */
  int arrays;                /* of the user's call */
  enum combination combines; /* how boxes combine what they receive */
  int begin;
  int64_t sent, received; /* bytes of each part of the stage */
  int send_count, receive_count, pack_count, fill_count, unpack_count;
  int announced_sends, announced_receives; /* messages behind a notice */
  /* The last `pair_count` packs and unpacks are for this rank itself; each pair has the same runs and counts. Results
   * of a plan with pairs are not in the memory of operands. The packs before them are in the order of the stage, and so
   * are the unpacks unless they are combined. */
  int pair_count;
  struct peer *sends, *receives;
  struct trial *trials; /* for each send: composed by ordinary stores, or by stores that bypass the cache */
  struct box *packs, *fills, *unpacks;
  const int64_t *elements; /* of each operand, then of each result */
};

/* A message begins with a label. The label is a hash of the signature, of the attribute `derivative` of the call, and
 * of the number of the call, from 1, among the calls with a plan on this communicator. The bytes of the message are
 * added to it. Short messages travel faster, so it is short. */
enum { LABEL_BYTES = 8 };
uint64_t plan_label(const struct call *call, const struct plan *plan, uint64_t number);
static inline uint64_t label_to(const struct peer *peer, uint64_t label) { return label + (uint64_t)peer->bytes; }
static inline void label_put(char *message, uint64_t label) { memcpy(message, &label, LABEL_BYTES); }

/* A peer gets a notice first. A message of at most NOTICE_BYTES is the notice. For a longer message, the notice is the
 * label, which is shorter than any message, and the message follows. So a rank has room for any message with the tag of
 * notices, and posts the receive before it sends. Then the message arrives where it is read: no library gets a message
 * that is longer than the memory into which it is received. A notice costs about 0.5 us. */
enum { NOTICE_BYTES = 65536 };
static inline bool is_announced(const struct peer *peer) { return peer->bytes > NOTICE_BYTES; }

/* The plan that these numbers describe: see plan.c. NULL: out of memory, or they describe no plan. */
struct plan *plan_make(const int64_t *numbers, size_t count);

static inline bool is_of_messages(const struct plan *plan) { return plan->begin == BEGINS_AS_MESSAGES; }

/* The attribute of a call that is a plan; NULL: the operation has none. */
const struct plan *plan_of(const struct call *call);

static inline const struct buffer *plan_operand(const struct call *call, int leaf) {
  return &call->buffers[call->first[0] + leaf];
}
static inline const struct buffer *plan_result(const struct call *call, int leaf) {
  return &call->buffers[call->first[1] + leaf];
}

/* NULL, or the error: the arrays of the call are not those of the plan. The call has operands, results or both. */
ffi_error *plan_check(const struct call *call, const struct plan *plan, bool operands, bool results);

/* Compose the message of a send, which begins with the pack `next`, in `stage`, except for the label. Return the next
 * pack. */
int plan_compose_message(const struct call *call, const struct plan *plan, char *stage, int send, int next);

/* Compose the packs from `next` on. `pairs`: the pairs, too. */
void plan_compose_rest(const struct call *call, const struct plan *plan, char *stage, int next, bool pairs);

/* Set the results of `call` except for received parts. After plan_compose_rest. */
void plan_fill(const struct call *call, const struct plan *plan);

/* Copy the parts that this rank has for itself from the operands to the results. After plan_fill. */
void plan_copy_pairs(const struct call *call, const struct plan *plan);

/* Distribute received messages, and the parts that this rank had for itself. */
void plan_unpack(const struct call *call, const struct plan *plan, const char *stage);

/* Distribute the part of the stage before `end`, from the unpack `next` on, without the pairs, of a plan that does not
 * combine. Return the next unpack. */
int plan_unpack_until(const struct call *call, const struct plan *plan, const char *stage, int next, int64_t end);

/* Return whether each message may be unpacked when it has come (plan_unpack_until, after plan_copy_pairs). Otherwise
 * one wrong message must not change the results: then all are unpacked at the end, by plan_unpack. */
static inline bool is_unpacked_at_once(const struct plan *plan) {
  return !plan->combines && plan->begin != BEGINS_AS_OPERANDS;
}

/* After an error: sets all bits of results that do not begin as operands, so that neither parts of them nor old
 * contents of their memory look like numbers. */
void plan_spoil(const struct call *call, const struct plan *plan);

#endif
