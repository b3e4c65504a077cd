/* Messages between two ranks for others than the bodies: see struct abi. Threads: as there. */
#ifndef JAXMPI_MESSAGES_H
#define JAXMPI_MESSAGES_H

#include "mpi/bodies.h"

#define post_send ABI_LOCAL(post_send)

int post_send(const struct call *call, intptr_t *request);

#endif
