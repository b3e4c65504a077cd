/* A fake NCCL over the fake driver, and an adversary: it keeps the promises that NCCL makes, and no others.
 *
 * A group of calls is one kernel of a stream. The kernel runs late, in the order of the stream, and first spoils the
 * memory that it will write. The messages between two ranks keep their order. Each message carries the call, bytes,
 * type, reduction, root and number on the communicator. If the sender and the receiver of a message differ in any of
 * these, the process prints a line and ends with the status FAKE_NCCL_STATUS. It does the same after waiting for
 * FAKE_NCCL_PATIENCE seconds.
 * When GroupEnd names a peer for the first time, it waits until the peer is in a GroupEnd that names this rank.
 * CommInitRankConfig waits for all ranks.
 *
 * The fake counts breaches of the rules among the violations of the driver: two threads inside at a time; a range that
 * no kernel could use; a communicator that is unknown, was destroyed, or is destroyed while calls are outstanding; the
 * end of a group that has not begun.
 *
 * Compiled twice. libnccl.so.2 connects the ranks of a job, by shared memory. With FAKE_NCCL_ALONE, the other ranks
 * follow the rules of fake_mpi.h. This rank receives from rank r the bytes that it sends to r in the same group, or
 * else to itself, with r - rank added to each byte. If it sends nothing, it receives fake_byte(r, 0) and so on.
 *
 * Environment, read at each use:
 *   FAKE_NCCL_VERSION  the version
 *   FAKE_NCCL_FAIL     the name of a function that fails
 *   FAKE_NCCL_ASYNC    the code that CommGetAsyncError finds
 */
#ifndef JAXMPI_FAKE_NCCL_H
#define JAXMPI_FAKE_NCCL_H

#include <stdbool.h>

enum { FAKE_NCCL_RANKS = 8, FAKE_NCCL_STATUS = 66, FAKE_NCCL_PATIENCE = 100 };

struct fake_nccl {
  int live;        /* communicators that were made, and neither destroyed nor aborted */
  int outstanding; /* groups that have not ended */

  /* Groups since the last reset, and calls in these groups. `reset` also removes pending failures. */
  int groups, arrays;
  void (*reset)(void);
  void (*fail)(const char *function, int nth, int code); /* as in fake_driver.h */
  int (*calls)(const char *function);
};

struct fake_nccl *fake_nccl(void);

#endif
