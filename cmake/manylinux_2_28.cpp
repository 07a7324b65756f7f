// Symbols that a newer glibc or libstdc++ gives a new version, or that older ones lack, for wheels
// that run from glibc 2.28 on, as torch's own do. Each jumps to an older version, which means the
// same. They take the place of the newer symbols when libposembed.so is linked and are not
// exported.
#include <new>

// The first glibc of the processor: its instruction for a jump, its symbols' version, and the
// version of struct stat (glibc's bits/struct_stat.h of each).
#ifdef __aarch64__
#define POSEMBED_JUMP(name) "b " name
#define POSEMBED_OLDEST(x86_64_version) "GLIBC_2.17"
constexpr int stat_version = 0;
#else
#define POSEMBED_JUMP(name) "jmp " name "@PLT"
#define POSEMBED_OLDEST(x86_64_version) x86_64_version
constexpr int stat_version = 1;
#endif

#define POSEMBED_OLD_VERSION(name, version)                                                 \
  __asm__(".symver posembed_old_" #name "," #name "@" POSEMBED_OLDEST(                      \
      version) "\n.pushsection .text\n.globl " #name "\n.type " #name ", %function\n" #name \
               ": " POSEMBED_JUMP("posembed_old_" #name) "\n.size " #name ", . - " #name    \
                                                         "\n.popsection");
#define POSEMBED_OLD(name) POSEMBED_OLD_VERSION(name, "GLIBC_2.2.5")

// Mathematics.
POSEMBED_OLD(exp)
POSEMBED_OLD(exp2)
POSEMBED_OLD(log)
POSEMBED_OLD(log2)
POSEMBED_OLD(pow)

// Threads: glibc 2.34 moved them into libc.so.6.
POSEMBED_OLD(pthread_condattr_setpshared)
POSEMBED_OLD(pthread_create)
POSEMBED_OLD(pthread_detach)
POSEMBED_OLD(pthread_getspecific)
POSEMBED_OLD(pthread_join)
POSEMBED_OLD(pthread_key_create)
POSEMBED_OLD(pthread_key_delete)
POSEMBED_OLD(pthread_kill)
POSEMBED_OLD(pthread_mutex_trylock)
POSEMBED_OLD(pthread_mutexattr_destroy)
POSEMBED_OLD(pthread_mutexattr_init)
POSEMBED_OLD(pthread_mutexattr_setpshared)
POSEMBED_OLD(pthread_mutexattr_settype)
POSEMBED_OLD(pthread_once)
POSEMBED_OLD(pthread_rwlock_destroy)
POSEMBED_OLD(pthread_rwlock_init)
POSEMBED_OLD(pthread_rwlock_rdlock)
POSEMBED_OLD(pthread_rwlock_timedrdlock)
POSEMBED_OLD(pthread_rwlock_timedwrlock)
POSEMBED_OLD(pthread_rwlock_tryrdlock)
POSEMBED_OLD(pthread_rwlock_trywrlock)
POSEMBED_OLD(pthread_rwlock_unlock)
POSEMBED_OLD(pthread_rwlock_wrlock)
POSEMBED_OLD(pthread_rwlockattr_destroy)
POSEMBED_OLD(pthread_rwlockattr_init)
POSEMBED_OLD(pthread_rwlockattr_setpshared)
POSEMBED_OLD(pthread_setspecific)
POSEMBED_OLD(pthread_spin_destroy)
POSEMBED_OLD(pthread_spin_init)
POSEMBED_OLD(pthread_spin_lock)
POSEMBED_OLD(pthread_spin_trylock)
POSEMBED_OLD(pthread_spin_unlock)
POSEMBED_OLD(sem_destroy)
POSEMBED_OLD(sem_init)
POSEMBED_OLD(sem_post)
POSEMBED_OLD(sem_timedwait)
POSEMBED_OLD(sem_trywait)
POSEMBED_OLD(sem_wait)

// Libraries and shared memory, which moved with them; the CUDA runtime needs these.
POSEMBED_OLD(dlclose)
POSEMBED_OLD(dlerror)
POSEMBED_OLD(dlopen)
POSEMBED_OLD(dlsym)
POSEMBED_OLD(dlvsym)
POSEMBED_OLD(shm_open)
POSEMBED_OLD(shm_unlink)
POSEMBED_OLD_VERSION(dlmopen, "GLIBC_2.3.4")

// Declared here and not by the system's headers: their declarations carry attributes that
// definitions may not repeat.
struct stat;
extern "C" int __fxstat(int version, int file, struct stat* result);
extern "C" int fstat(int file, struct stat* result) { return __fxstat(stat_version, file, result); }

namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std

// libstdc++'s shared_ptr skips atomic operations while this says that there is one thread.
extern "C" char __libc_single_threaded = 0;
