// Checks whether AMX works here. Under a hypervisor that does not support AMX, CPUID and the
// operating system may still report it.
#pragma once

namespace kvarn {

// Asks the system for the tile registers, then lets a child process multiply known tiles. A crash
// or a hang of the child does not harm this process. True if every result equals the one computed
// here, in the order of sums that kernels rely on.
bool amx_works();

}  // namespace kvarn
