/* A fake NCCL over the fake driver, and an adversary: it breaks no promise of NCCL's, and keeps none that NCCL does not
 * make.
 *
 * A group of calls is one kernel of its stream: it runs late, in the order of the stream, and first spoils what it will
 * write. The messages between two ranks keep their order, and each carries what it belongs to: the call, bytes, type,
 * reduction, root and number on the communicator. If two ranks differ in any of these the process ends with a line and
 * the status FAKE_NCCL_STATUS; so it does after waiting for FAKE_NCCL_PATIENCE seconds.
 * GroupEnd waits for each peer that it meets for the first time until the peer is in a GroupEnd that names this rank,
 * and CommInitRankConfig for all ranks.
 *
 * Breaches are violations of the driver's: two threads inside at a time; a range that no kernel could use; a
 * communicator that is unknown, was destroyed, or is destroyed while calls are outstanding; a group without an end.
 *
 * Compiled twice. libnccl.so.2 connects the ranks of a job, by shared memory. With FAKE_NCCL_ALONE, the other ranks
 * follow the rules of fake_mpi.h: of what is received from rank r, it is what this rank sends to r in the same group,
 * or else to itself, with r - rank added to each byte; otherwise fake_byte(r, 0), fake_byte(r, 1), ...
 *
 * Environment, read at each use: FAKE_NCCL_VERSION is the version; FAKE_NCCL_FAIL is the name of a function that fails,
 * and FAKE_NCCL_ASYNC the code that CommGetAsyncError finds.
 */
#ifndef JAXMPI_FAKE_NCCL_H
#define JAXMPI_FAKE_NCCL_H

#include <stdbool.h>

enum { FAKE_NCCL_RANKS = 8, FAKE_NCCL_STATUS = 66, FAKE_NCCL_PATIENCE = 100 };

struct fake_nccl {
  int live;        /* communicators made, and neither destroyed nor aborted */
  int outstanding; /* groups that have not ended */

  /* Since the last reset. */
  int groups, arrays; /* and calls in them */
  void (*reset)(void);
  void (*fail)(const char *function, int nth, int code); /* as in fake_driver.h */
  int (*calls)(const char *function);
};

struct fake_nccl *fake_nccl(void);

#endif
