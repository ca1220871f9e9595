package container

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// MakeNetwork makes a network namespace that has only loopback and keeps it at path until RemoveNetwork.
func MakeNetwork(path string) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY, 0o644)
	if err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and no other goroutine gets its network
		made <- makeNetwork(path)
	}()
	return <-made
}

func makeNetwork(path string) error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("make a network namespace: %w", err)
	}
	if err := loopbackUp(); err != nil {
		return err
	}
	if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("keep the network namespace at %s: %w", path, err)
	}
	return nil
}

// loopbackUp sets the flag that `ip link set lo up` sets.
func loopbackUp() (err error) {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(socket)) }()
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_LOOPBACK | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, request); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// RemoveNetwork removes what MakeNetwork made.
func RemoveNetwork(path string) error {
	if err := unix.Unmount(path, 0); err != nil && err != unix.EINVAL { // EINVAL: it is no mount
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	return os.Remove(path)
}

// JoinNetwork moves the calling thread, which must be locked, into the network namespace at path.
func JoinNetwork(path string) (err error) {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if err := unix.Setns(int(file.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter the network namespace %s: %w", path, err)
	}
	return nil
}
