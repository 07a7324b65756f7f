// Symbols that a newer glibc or libstdc++ gives a new version, or that older ones lack, for wheels
// that run from glibc 2.28 on, as torch's own do: each calls the version of glibc 2.2.5, with the
// same meaning. They take the place of the newer symbols when libposembed.so is linked and are not
// exported.
#include <new>

#define POSEMBED_OLD(result, name, parameters, arguments)          \
  extern "C" result posembed_old_##name parameters;                \
  __asm__(".symver posembed_old_" #name "," #name "@GLIBC_2.2.5"); \
  extern "C" result name parameters { return posembed_old_##name arguments; }

// Declared here and not by the system's headers: their declarations carry attributes that
// definitions may not repeat.
struct stat;

POSEMBED_OLD(double, exp2, (double x), (x))
POSEMBED_OLD(double, log, (double x), (x))
POSEMBED_OLD(double, log2, (double x), (x))
POSEMBED_OLD(double, pow, (double x, double y), (x, y))
POSEMBED_OLD(double, exp, (double x), (x))
POSEMBED_OLD(void*, pthread_getspecific, (unsigned key), (key))
POSEMBED_OLD(int, pthread_setspecific, (unsigned key, const void* value), (key, value))
POSEMBED_OLD(int, pthread_key_create, (unsigned* key, void (*destroy)(void*)), (key, destroy))
POSEMBED_OLD(int, pthread_key_delete, (unsigned key), (key))
POSEMBED_OLD(int, pthread_mutex_trylock, (void* mutex), (mutex))
POSEMBED_OLD(int, pthread_once, (void* once, void (*function)()), (once, function))
POSEMBED_OLD(int, pthread_rwlock_rdlock, (void* lock), (lock))
POSEMBED_OLD(int, pthread_rwlock_wrlock, (void* lock), (lock))
POSEMBED_OLD(int, pthread_rwlock_unlock, (void* lock), (lock))

extern "C" int __fxstat(int version, int file, struct stat* result);
extern "C" int fstat(int file, struct stat* result) { return __fxstat(1, file, result); }

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

// libstdc++'s shared_ptr skips atomic operations while this says that there is one thread.
extern "C" char __libc_single_threaded = 0;
