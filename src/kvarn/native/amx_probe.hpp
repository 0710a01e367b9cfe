// Whether AMX can be trusted here: CPUID and the kernel may promise what a hypervisor does not keep.
#pragma once

namespace kvarn {

// Asks the system for the tile registers, then has a child process multiply known tiles: whatever happens to the child,
// this process goes on. True when every number came back as computed here, in the order of sums that kernels rely on.
bool amx_works();

}  // namespace kvarn
