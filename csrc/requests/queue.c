#include "requests/queue.h"

#include <stdlib.h>

struct unexpected {
  struct unexpected *next;
  struct communicator *comm;
  struct message_info info;
};

atomic_int queue_posted_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct receive *first_posted;
static struct unexpected *first_unexpected;

/* --- the queues: under the lock --- */

/* Change a counter under the lock. It is read without the lock. */
static void count_more(atomic_int *number, int more) {
  atomic_store_explicit(number, atomic_load_explicit(number, memory_order_relaxed) + more, memory_order_release);
}

static void remove_receive(struct receive *receive) {
  struct receive **at = &first_posted;
  while (*at != NULL && *at != receive) at = &(*at)->next;
  if (*at == NULL) return;
  *at = receive->next;
  count_more(&receive->comm->queued, -1);
  count_more(&queue_posted_count, -1);
}

static bool append_unexpected(struct communicator *comm, const struct message_info *info) {
  struct unexpected *entry = aligned_alloc(_Alignof(struct unexpected), sizeof *entry), **at = &first_unexpected;
  if (entry == NULL) return false;
  *entry = (struct unexpected){.comm = comm, .info = *info};
  while (*at != NULL) at = &(*at)->next;
  *at = entry;
  count_more(&comm->queued, 1);
  return true;
}

static void remove_unexpected(struct unexpected *message) {
  struct unexpected **at = &first_unexpected;
  while (*at != message) at = &(*at)->next;
  *at = message->next;
  count_more(&message->comm->queued, -1);
  free(message);
}

/* --- which message is for which receive --- */

static bool receive_fits(const struct receive *receive, const struct message_info *info) {
  return (receive->source == runtime.abi->any_source || receive->source == info->source) &&
         receive_accepts(receive, info->tag);
}

static bool receives_overlap(const struct receive *a, const struct receive *b) {
  int any_source = runtime.abi->any_source, any_tag = runtime.abi->any_tag;
  return a->comm == b->comm && (a->source == b->source || a->source == any_source || b->source == any_source) &&
         (a->tag == b->tag || a->tag == any_tag || b->tag == any_tag);
}

/* Return whether every message that fits `a` also fits `b`. */
static bool is_within(const struct receive *a, const struct receive *b) {
  return (b->source == runtime.abi->any_source || a->source == b->source) &&
         (b->tag == runtime.abi->any_tag || a->tag == b->tag);
}

/* Return the first posted receive of the communicator that a message fits, before `last`; otherwise `last`. */
static struct receive *first_for(const struct communicator *comm, const struct message_info *info,
                                 struct receive *last) {
  struct receive *to = first_posted;
  while (to != last && (to->comm != comm || !receive_fits(to, info))) to = to->next;
  return to;
}

/* Return whether a message may fit this receive and an earlier one. The earlier one must then get the first message
 * that fits it. That may be another message, which has come since the earlier receive was tried. */
static bool is_behind_others(const struct receive *receive) {
  const struct receive *other = first_posted;
  while (other != receive && (!receives_overlap(other, receive) || is_within(other, receive))) other = other->next;
  return other != receive;
}

static void deliver_message(struct receive *receive, const struct message_info *info) {
  remove_receive(receive);
  receive->info = *info;
  receive->state = RECEIVE_MATCHED;
  runtime.abi->receive(receive);
}

/* Deliver an unexpected message to a receive, if one fits it. Return whether it did. */
static bool deliver_unexpected(struct receive *receive) {
  struct unexpected *message = first_unexpected;
  while (message != NULL && (message->comm != receive->comm || !receive_fits(receive, &message->info)))
    message = message->next;
  if (message == NULL) return false;
  deliver_message(receive, &message->info);
  remove_unexpected(message);
  return true;
}

/* Match a message that a receive with any tag was offered and may not have. Deliver it to another receive, or keep
 * it. Return an MPI error code, or CODE_NO_MEMORY. */
static int match_for_others(struct communicator *comm, int source, int tag) {
  struct message_info info;
  bool there = false;
  int code = runtime.abi->match(comm, source, tag, &there, &info);
  if (code != 0 || !there) return code;
  struct receive *to = first_for(comm, &info, NULL);
  if (to != NULL)
    deliver_message(to, &info);
  else if (!append_unexpected(comm, &info))
    return CODE_NO_MEMORY;
  return 0;
}

static bool fail_match(struct receive *receive, const char *function, int code) {
  remove_receive(receive);
  receive->code = code, receive->function = function, receive->state = RECEIVE_MATCHED;
  return false;
}

/* Match a message that this receive may have, if one has come. Deliver it, or an earlier message, to the first
 * receive that it fits. */
static bool match_posted(struct receive *receive) {
  struct message_info info;
  bool there = false;
  int code, source = receive->source, tag = receive->tag;
  if (deliver_unexpected(receive)) return true;
  if (tag == runtime.abi->any_tag || is_behind_others(receive)) {
    code = runtime.abi->probe(receive->comm, source, tag, &there, &info);
    if (code != 0) return fail_match(receive, "MPI_Iprobe", code);
    if (!there) return false;
    if (!receive_accepts(receive, info.tag)) {
      code = match_for_others(receive->comm, info.source, info.tag);
      return code == 0 || fail_match(receive, "MPI_Improbe", code);
    }
    struct receive *to = first_for(receive->comm, &info, receive);
    if (to != receive && !is_within(to, receive)) return match_posted(to);
    source = info.source, tag = info.tag;
  }
  code = runtime.abi->match(receive->comm, source, tag, &there, &info);
  if (code != 0) return fail_match(receive, "MPI_Improbe", code);
  if (there) deliver_message(first_for(receive->comm, &info, receive), &info);
  return there;
}

/* --- for all threads --- */

void queue_match(void) {
  struct receive *next;
  pthread_mutex_lock(&lock);
  /* Unexpected messages came before the messages that MPI still has. */
  for (struct receive *receive = first_unexpected != NULL ? first_posted : NULL; receive != NULL; receive = next) {
    next = receive->next;
    if (receive->state == RECEIVE_POSTED) deliver_unexpected(receive);
  }
  for (struct receive *receive = first_posted; receive != NULL; receive = next) {
    next = receive->next;
    while (receive->state == RECEIVE_POSTED && match_posted(receive)) continue;
  }
  pthread_mutex_unlock(&lock);
}

void queue_post(struct receive *receive) {
  pthread_mutex_lock(&lock);
  struct receive **at = &first_posted;
  while (*at != NULL) at = &(*at)->next;
  *at = receive;
  receive->next = NULL;
  receive->state = RECEIVE_POSTED;
  count_more(&receive->comm->queued, 1);
  count_more(&queue_posted_count, 1);
  pthread_mutex_unlock(&lock);
}

bool queue_withdraw(struct receive *receive) {
  pthread_mutex_lock(&lock);
  bool matched = receive->state == RECEIVE_MATCHED || receive->state == RECEIVE_UNDER_WAY;
  if (receive->state == RECEIVE_POSTED) {
    remove_receive(receive);
    receive->state = RECEIVE_IDLE;
  }
  pthread_mutex_unlock(&lock);
  return !matched;
}

bool queue_withdraw_alone(struct receive *receive) {
  pthread_mutex_lock(&lock);
  bool alone = receive->state == RECEIVE_POSTED && atomic_load(&queue_posted_count) == 1 &&
               atomic_load(&receive->comm->queued) == 1;
  if (alone) remove_receive(receive);
  pthread_mutex_unlock(&lock);
  return alone;
}

void queue_await(struct receive *receive) {
  pthread_mutex_lock(&lock);
  receive->waited_for = true;
  pthread_mutex_unlock(&lock);
}

bool queue_has(const struct receive *receive) {
  pthread_mutex_lock(&lock);
  bool posted = receive->state == RECEIVE_POSTED;
  pthread_mutex_unlock(&lock);
  return posted;
}

bool queue_add_unexpected(struct communicator *comm, const struct message_info *info) {
  pthread_mutex_lock(&lock);
  bool kept = append_unexpected(comm, info);
  pthread_mutex_unlock(&lock);
  return kept;
}

void queue_forget(const struct communicator *comm) {
  pthread_mutex_lock(&lock);
  for (struct receive *receive = first_posted, *next; receive != NULL; receive = next) {
    next = receive->next;
    if (receive->comm == comm || comm == runtime.self) remove_receive(receive), receive->state = RECEIVE_IDLE;
  }
  for (struct unexpected *message = first_unexpected, *next; message != NULL; message = next) {
    next = message->next;
    if (message->comm == comm || comm == runtime.self) remove_unexpected(message);
  }
  pthread_mutex_unlock(&lock);
}
