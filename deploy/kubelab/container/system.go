package container

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// A device is a file in /dev that every container has.
type device struct {
	name         string
	major, minor uint32
}

var devices = []device{
	{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0},
}

// devLinks are the links in /dev that every container has.
var devLinks = map[string]string{
	"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
}

// mountSystem mounts /proc, /sys and /dev as a container runtime does. /dev is the container's own, because the
// termination message is a file in it.
func mountSystem(sys source) error {
	if err := unix.Mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := sys.attach(); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/dev", "tmpfs", unix.MS_NOSUID, "mode=755,size=64k"); err != nil {
		return fmt.Errorf("mount /dev: %w", err)
	}
	defer unix.Umask(unix.Umask(0)) // a device can be used by everybody
	for _, d := range devices {
		if err := unix.Mknod("/dev/"+d.name, unix.S_IFCHR|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return fmt.Errorf("make /dev/%s: %w", d.name, err)
		}
	}
	for name, target := range devLinks {
		if err := os.Symlink(target, "/dev/"+name); err != nil {
			return err
		}
	}
	if err := mountAt("/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620"); err != nil {
		return err
	}
	// 64 MiB is what a container has unless its pod mounts a volume there.
	return mountAt("/dev/shm", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=1777,size=64m")
}

func mountAt(target, kind string, flags uintptr, options string) error {
	if err := os.Mkdir(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(kind, target, kind, flags, options); err != nil {
		return fmt.Errorf("mount %s: %w", target, err)
	}
	return nil
}
