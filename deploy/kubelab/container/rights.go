package container

import (
	"fmt"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// capabilities names the capabilities by their numbers, as in linux/capability.h.
var capabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN", "CAP_NET_RAW",
	"CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE", "CAP_SYS_PACCT",
	"CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD",
	"CAP_LEASE", "CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL", "CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG",
	"CAP_WAKE_ALARM", "CAP_BLOCK_SUSPEND", "CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
}

// DefaultCapabilities are those that containerd leaves to a container whose pod says nothing about them.
var DefaultCapabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE",
}

// AllCapabilities are those of a privileged container.
func AllCapabilities() []string { return slices.Clone(capabilities) }

// restrict takes from this thread what the container must not have: capabilities, the user root, and the way to get
// either back by a set-user-ID program.
func restrict(spec Spec) error {
	for number, name := range capabilities {
		if slices.Contains(spec.Capabilities, name) {
			continue
		}
		// A program that root executes gets the capabilities of the bounding set. EINVAL: this kernel is older than the capability.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(number), 0, 0, 0); err != nil && err != unix.EINVAL {
			return fmt.Errorf("drop %s: %w", name, err)
		}
	}
	if spec.NoNewPrivileges {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("set no_new_privs: %w", err)
		}
	}
	if err := becomeUser(spec); err != nil {
		return err
	}
	// A change of the user clears this. Without a shim, nobody would wait for the container.
	return unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
}

// becomeUser changes the user and the groups. It uses package syscall, which changes them for all threads, so that the
// last look at the new user's rights, the execution of the command, cannot differ between threads.
func becomeUser(spec Spec) error {
	if err := syscall.Setgroups(spec.Groups); err != nil {
		return fmt.Errorf("set the groups %v: %w", spec.Groups, err)
	}
	if err := syscall.Setgid(spec.Group); err != nil {
		return fmt.Errorf("set the group %d: %w", spec.Group, err)
	}
	if err := syscall.Setuid(spec.User); err != nil {
		return fmt.Errorf("set the user %d: %w", spec.User, err)
	}
	return nil
}
