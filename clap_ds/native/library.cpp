// Asked once by `library.py`, before any kernel runs.

#include <sys/syscall.h>
#include <unistd.h>

// Linux lets a process use AMX tiles only after it has asked (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA). 0 when it may, or
// when this library has no use for them.
extern "C" int clap_request_amx() {
#if defined(CLAP_AMX) && !defined(CLAP_EMULATED_AMX)
    return (int)syscall(SYS_arch_prctl, 0x1023, 18);
#else
    return 0;
#endif
}
