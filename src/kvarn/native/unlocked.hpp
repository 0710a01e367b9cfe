// Releases Python's lock while native code computes.
//
// When the interpreter exits, Python ends every daemon thread that asks for the lock. Ending a thread
// inside C++ frames aborts the process. So before the exit `finish_unlocked` waits until no native
// call runs without the lock, and from then on native calls keep it.
#pragma once

#include <Python.h>

namespace kvarn {

class Unlocked {
  public:
    Unlocked();
    ~Unlocked();
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    PyThreadState* state_ = nullptr;
};

void finish_unlocked();  // called with the lock

}  // namespace kvarn
