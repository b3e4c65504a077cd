/* Files in a folder whose path others may know: nobody else can have us write into a file that was there before, or
 * through a link to somewhere else, and nobody else can put another file in the place of ours.
 *
 * The folder is opened once and looked at by its descriptor, not by its path, which may lead elsewhere a moment later.
 * It must belong to this user or to root. If everyone may write into it it must be sticky, as /tmp is. That a group may
 * write into it is a choice of its owner's.
 *
 * Threads: any. Nothing here takes a lock, or keeps anything. */
#ifndef JAXMPI_PRIVATE_H
#define JAXMPI_PRIVATE_H

#include <sys/types.h>

/* The descriptor of a folder that is there; -1: errno, and in `reason` a text that is never freed, such as
 * "it belongs to another user". */
int private_folder(const char *path, const char **reason);

/* The descriptor of a new file in it, to be written at its end. `name` is of the file alone. -1: errno; EEXIST where
 * there is anything of that name, also a link that leads nowhere. */
int private_create(int folder, const char *name, mode_t mode);
#endif
