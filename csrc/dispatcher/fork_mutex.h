// Locks in a process that forks. A child copies every lock as it is, and the thread that held one
// does not exist in the child. fork() therefore waits until no thread writes under these locks, and
// opens them in the child (pthread_atfork), which keeps what they protect.
#pragma once

#include <shared_mutex>

namespace posembed::dispatcher {

/// A shared mutex of an object that is made while the library is loaded and never destroyed. A
/// thread that holds one calls no code that may fork or lock another.
class ForkMutex : public std::shared_mutex {
 public:
  ForkMutex();

  ForkMutex* const next;  // made before; null for the first
};

}  // namespace posembed::dispatcher
