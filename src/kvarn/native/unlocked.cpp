#include "unlocked.hpp"

#include <pthread.h>

#include <atomic>

namespace kvarn {

namespace {

std::atomic<int> running{0};  // native calls without the lock
bool exiting = false;         // guarded by the lock

// The other threads of the parent do not exist in a forked process.
[[maybe_unused]] const int forked = pthread_atfork(nullptr, nullptr, [] { running = 0; });

}  // namespace

Unlocked::Unlocked() {
    if (exiting) return;
    running.fetch_add(1);
    state_ = PyEval_SaveThread();
}

Unlocked::~Unlocked() {
    if (state_ == nullptr) return;
    PyEval_RestoreThread(state_);
    running.fetch_sub(1);
    running.notify_all();
}

void finish_unlocked() {
    exiting = true;
    PyThreadState* state = PyEval_SaveThread();
    for (int n = running.load(); n > 0; n = running.load()) running.wait(n);
    PyEval_RestoreThread(state);
}

}  // namespace kvarn
