// Asks the dispatcher for an operator by name.
#include <ATen/core/dispatch/Dispatcher.h>

#include <iostream>

int main() {
  const auto found = c10::Dispatcher::singleton().findSchema({"posembed::rotary", ""});
  std::cout << (found ? "found " : "lost ") << "posembed::rotary\n";
  return found ? 0 : 1;
}
