#include "execute/agreement.h"

#include <sched.h>
#include <stdlib.h>

#include "base/hash.h"
#include "core/abi.h"

enum { MOST_ROUNDS = 31, OF_COMPARISON = MOST_ROUNDS, TAGS = MOST_ROUNDS + 1 };
enum kind { MESSAGE_ASKS, MESSAGE_LEAVES, MESSAGE_STOPS };

struct message {
  int64_t name, number; /* of the communicator, of the question */
  int64_t kind;
  int64_t least[2]; /* of the numbers known so far, and of their complements */
};

struct round {
  struct message out, in;
  intptr_t send, receive; /* MPI_Request */
  bool sending, receiving;
};

struct question {
  struct question *next;
  int64_t number, least[2];
  char about[QUESTION_BYTES];
  int known;     /* rounds whose message has come */
  bool answered; /* or left: kept only until the messages are complete */
  bool unknown;  /* a rank has gone on without an answer */
  struct round rounds[];
};

struct agreement {
  struct agreement *next; /* in runtime.agreements */
  pthread_mutex_t lock;
  int64_t name, group;
  int rounds, tag;
  int64_t asked;
  struct question *first; /* in their order */
  atomic_int unanswered;
  atomic_bool begun; /* read without the lock, of another communicator */
  bool stopped;
  int code;          /* the first error of MPI */
  int size, ranks[]; /* of COMM_WORLD */
};

/* Called between two polls. `polls`: how many there were. False: it is time to stop. */
enum { POLLS_AT_ONCE = 50, POLLS_PER_TIME = 16 };
static bool go_on(double seconds, double begin, long polls) {
  if (polls >= POLLS_AT_ONCE) sched_yield();
  return seconds < 0 || polls % POLLS_PER_TIME != 0 || seconds_now() - begin < seconds;
}

/* --- the names of communicators --- */

bool agreement_prepare(struct communicator *comm, int64_t name, const int *ranks) {
  struct agreement *agreement = calloc(1, sizeof *agreement + (size_t)comm->size * sizeof *ranks);
  if (agreement == NULL) return false;
  pthread_mutex_init(&agreement->lock, NULL);
  agreement->size = comm->size;
  agreement->name = name;
  memcpy(agreement->ranks, ranks, (size_t)comm->size * sizeof *ranks);
  uint64_t group = HASH_START;
  for (int i = 0; i < comm->size; i++) group = hash_add(group, ranks[i]);
  agreement->group = (int64_t)group;
  while (((int64_t)1 << agreement->rounds) < comm->size) agreement->rounds++;
  agreement->next = atomic_load(&runtime.agreements);
  atomic_store(&comm->agreement, agreement);
  atomic_store(&runtime.agreements, agreement);
  return true;
}

/* The number of communicators of the same ranks, in the same order, that had a question before. */
static int64_t same_before(const struct agreement *agreement) {
  int64_t before = 0;
  for (struct agreement *other = atomic_load(&runtime.agreements); other != NULL; other = other->next)
    before += other != agreement && other->begun && other->group == agreement->group && other->size == agreement->size;
  return before;
}

/* Give the agreement a name before the first question. False: no name is certain to be the same on all ranks. */
static bool begin_asking(struct agreement *agreement) {
  if (agreement->begun || agreement->stopped) return agreement->begun;
  if (agreement->name == 0 && atomic_load(&runtime.several_threads)) return false;
  if (agreement->name == 0) {
    uint64_t hash = hash_add((uint64_t)agreement->group, agreement->size);
    agreement->name = (int64_t)hash_fold(hash_add(hash, same_before(agreement)), 32);
  }
  agreement->begun = true;
  int blocks = (runtime.most_tag < 1 << 30 ? runtime.most_tag : 1 << 30) / TAGS;
  agreement->tag = TAGS * (int)((uint64_t)agreement->name % (uint64_t)blocks);
  return true;
}

/* --- messages --- */

static int rank_at(const struct communicator *comm, const struct agreement *agreement, int64_t distance) {
  return agreement->ranks[(comm->rank + distance + comm->size) % comm->size];
}

/* Return whether MPI has posted a message, by the error code. */
static bool is_posted(struct agreement *agreement, int code) {
  if (agreement->code == 0) agreement->code = code;
  return code == 0;
}

/* Send the message of round `k`, if it has not been sent. */
static void send_round(const struct communicator *comm, struct agreement *agreement, struct question *question, int k,
                       enum kind kind) {
  struct round *round = &question->rounds[k];
  if (round->out.number != 0) return;
  round->out = (struct message){agreement->name, question->number, kind, {question->least[0], question->least[1]}};
  int code = runtime.abi->post(&round->out, sizeof round->out, true, rank_at(comm, agreement, (int64_t)1 << k),
                               agreement->tag + k, &round->send);
  round->sending = is_posted(agreement, code);
}

static bool is_done(intptr_t *request, bool *under_way) {
  bool done = true;
  if (*under_way && runtime.abi->test(request, &done) == 0 && !done) return false;
  *under_way = false;
  return true;
}

/* Return whether the question's messages are complete. */
static bool is_over(const struct agreement *agreement, struct question *question) {
  bool over = question->answered;
  for (int k = 0; k < agreement->rounds && over; k++)
    over = is_done(&question->rounds[k].send, &question->rounds[k].sending) &&
           is_done(&question->rounds[k].receive, &question->rounds[k].receiving);
  return over;
}

static void drop_finished(struct agreement *agreement) {
  for (struct question **at = &agreement->first, *question; (question = *at) != NULL;) {
    if (!is_over(agreement, question)) {
      at = &question->next;
      continue;
    }
    *at = question->next;
    free(question);
  }
}

static void close_question(struct agreement *agreement, struct question *question) {
  question->answered = true;
  atomic_fetch_sub(&agreement->unanswered, 1);
}

/* --- questions --- */

static struct question *question_new(struct agreement *agreement, int64_t number) {
  struct question *question = calloc(1, sizeof *question + (size_t)agreement->rounds * sizeof(struct round));
  if (question == NULL) return NULL;
  question->number = ++agreement->asked;
  question->least[0] = number, question->least[1] = ~number;
  struct question **last = &agreement->first;
  while (*last != NULL) last = &(*last)->next;
  atomic_fetch_add(&agreement->unanswered, 1);
  return *last = question;
}

static void leave_questions(const struct communicator *comm, struct agreement *agreement, enum kind kind) {
  for (struct question *question = agreement->first; question != NULL; question = question->next) {
    if (question->answered) continue;
    for (int k = 0; k < agreement->rounds; k++) send_round(comm, agreement, question, k, kind);
    close_question(agreement, question);
  }
}

static void stop_asking(struct communicator *comm, struct agreement *agreement) {
  atomic_store(&comm->to_compare, 0);
  if (agreement->begun && !agreement->stopped) question_new(agreement, 0); /* for ranks that have the answers so far */
  agreement->stopped = true;
  leave_questions(comm, agreement, MESSAGE_STOPS);
}

int agreement_ask(struct communicator *comm, int64_t number, const void *about) {
  struct agreement *agreement = atomic_load(&comm->agreement);
  if (agreement == NULL) return NOT_ASKED;
  pthread_mutex_lock(&agreement->lock);
  struct question *question = NULL;
  drop_finished(agreement);
  if (begin_asking(agreement) && !agreement->stopped && (question = question_new(agreement, number)) != NULL) {
    memcpy(question->about, about, sizeof question->about);
    for (int k = 0; k < agreement->rounds; k++) {
      struct round *round = &question->rounds[k];
      int code = runtime.abi->post(&round->in, sizeof round->in, false, rank_at(comm, agreement, -((int64_t)1 << k)),
                                   agreement->tag + k, &round->receive);
      round->receiving = is_posted(agreement, code);
    }
    send_round(comm, agreement, question, 0, MESSAGE_ASKS);
    if (agreement->code != 0) stop_asking(comm, agreement);
  }
  int code = question != NULL || agreement->code != 0 ? agreement->code : NOT_ASKED;
  pthread_mutex_unlock(&agreement->lock);
  return code;
}

/* Take a message of a round. False: a rank has stopped asking, or asks something else under this name. */
static bool take_answer(const struct agreement *agreement, struct question *question, const struct message *message) {
  if (message->name != agreement->name || message->number != question->number || message->kind == MESSAGE_STOPS)
    return false;
  question->unknown |= message->kind != MESSAGE_ASKS;
  for (int i = 0; i < 2; i++)
    if (message->least[i] < question->least[i]) question->least[i] = message->least[i];
  return true;
}

/* Poll for the answer to a question. */
static enum answer poll_answer(struct communicator *comm, struct agreement *agreement, struct question *question) {
  while (question->known < agreement->rounds) {
    struct round *round = &question->rounds[question->known];
    if (!is_done(&round->receive, &round->receiving)) return ANSWER_NONE;
    if (!take_answer(agreement, question, &round->in)) return stop_asking(comm, agreement), ANSWER_NEVER;
    if (++question->known < agreement->rounds)
      send_round(comm, agreement, question, question->known, question->unknown ? MESSAGE_LEAVES : MESSAGE_ASKS);
  }
  close_question(agreement, question);
  bool same = question->least[0] == ~question->least[1];
  return same || question->unknown ? ANSWER_SAME : ANSWER_DIFFERENT;
}

enum answer agreement_hear(struct communicator *comm, double seconds, void *about) {
  struct agreement *agreement = atomic_load(&comm->agreement);
  if (!agreement_is_open(comm)) return ANSWER_SAME;
  double begin = seconds_now();
  for (long polls = 0;; polls++) {
    enum answer answer = ANSWER_SAME;
    pthread_mutex_lock(&agreement->lock);
    for (struct question *question = agreement->first; question != NULL && answer == ANSWER_SAME;
         question = question->next) {
      if (question->answered) continue;
      answer = poll_answer(comm, agreement, question);
      memcpy(about, question->about, sizeof question->about);
    }
    pthread_mutex_unlock(&agreement->lock);
    if (answer != ANSWER_NONE) return answer;
    if (polls % POLLS_PER_TIME == 0 && runtime.abi->is_revoked(comm)) return ANSWER_NEVER; /* MPI reports the error */
    if (!go_on(seconds, begin, polls)) return ANSWER_NONE;
  }
}

bool agreement_is_of_default(const struct communicator *comm) {
  const struct agreement *agreement = atomic_load(&comm->agreement);
  return agreement != NULL && agreement->name == NAME_OF_DEFAULT;
}

bool agreement_is_open(const struct communicator *comm) {
  const struct agreement *agreement = atomic_load_explicit(&comm->agreement, memory_order_acquire);
  return agreement != NULL && atomic_load_explicit(&agreement->unanswered, memory_order_relaxed) > 0;
}

void agreement_leave(struct communicator *comm, bool for_ever) {
  struct agreement *agreement = atomic_load(&comm->agreement);
  pthread_mutex_lock(&agreement->lock);
  if (for_ever) stop_asking(comm, agreement);
  leave_questions(comm, agreement, MESSAGE_LEAVES);
  pthread_mutex_unlock(&agreement->lock);
}

static void cancel_receive(intptr_t *request, bool *under_way) {
  if (*under_way) runtime.abi->cancel(request);
  *under_way = false;
}

static void end_questions(struct agreement *agreement) {
  pthread_mutex_lock(&agreement->lock);
  agreement->stopped = true;
  for (struct question *question = agreement->first; question != NULL; question = question->next) {
    for (int k = 0; k < agreement->rounds; k++)
      cancel_receive(&question->rounds[k].receive, &question->rounds[k].receiving);
    if (!question->answered) close_question(agreement, question);
  }
  drop_finished(agreement);
  pthread_mutex_unlock(&agreement->lock);
}

void agreement_end(struct communicator *comm) {
  struct agreement *agreement = atomic_load(&comm->agreement);
  atomic_store(&comm->to_compare, 0);
  if (agreement != NULL) end_questions(agreement);
}

void agreement_finish(void) {
  if (runtime_has_ended()) return;
  for (struct agreement *agreement = atomic_load(&runtime.agreements); agreement != NULL; agreement = agreement->next)
    end_questions(agreement);
}

/* --- reports of all ranks --- */

bool agreement_gather(struct communicator *comm, const void *mine, void *all, bool *came, size_t bytes,
                      double seconds) {
  struct agreement *agreement = atomic_load(&comm->agreement);
  int size = comm->size, tag = agreement->tag + OF_COMPARISON, waiting = size;
  struct round *rounds = calloc((size_t)size, sizeof *rounds);
  if (rounds == NULL) return false;
  for (int i = 0; i < size; i++) {
    struct round *round = &rounds[i];
    char *place = (char *)all + (size_t)i * bytes;
    round->receiving = runtime.abi->post(place, bytes, false, agreement->ranks[i], tag, &round->receive) == 0;
    round->sending =
        runtime.abi->post((void *)(uintptr_t)mine, bytes, true, agreement->ranks[i], tag, &round->send) == 0;
  }
  double start = seconds_now();
  for (long polls = 0; waiting > 0; polls++) {
    waiting = 0;
    for (int i = 0; i < size; i++)
      waiting += !is_done(&rounds[i].receive, &rounds[i].receiving) || !is_done(&rounds[i].send, &rounds[i].sending);
    if (waiting > 0 && !go_on(seconds, start, polls)) break;
  }
  bool through = true;
  for (int i = 0; i < size; i++) {
    came[i] = !rounds[i].receiving;
    through &= !rounds[i].sending;
    cancel_receive(&rounds[i].receive, &rounds[i].receiving);
  }
  free(rounds);
  return through;
}
