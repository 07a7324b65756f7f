// A few threads for work whose result nobody waits for.
#pragma once

#include <functional>

namespace posembed::token {

/// Runs `task` later on a thread of this process, or never: if too many wait, or the process ends.
/// Runs it at once where the system gives no thread. It must not throw. Works in a forked child,
/// which has threads of its own.
void run_in_background(std::function<void()> task);

}  // namespace posembed::token
