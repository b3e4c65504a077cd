#include "devices/nccl.h"
#include "devices/spaces.h"
#include "execute/chunks.h"

#define MEMORY memory_host
#include "execute/handlers.h"

static ffi_error *run(struct call *call) {
  if (call->by_nccl) return nccl_run_host(call);
  return call->leaves != NULL ? call_leaves(call) : call_chunks(call);
}

const struct memory memory_host = {.platform = "cpu", .host = true, .handlers = handlers, .run = run};
