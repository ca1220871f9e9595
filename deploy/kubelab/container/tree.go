package container

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// enterTree builds the container's file tree and makes it the root of this process. All mounts are in the process's own
// mount namespace, so they end with the container.
func enterTree(dir string, spec Spec) error {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	root, err := mountRoot(filepath.Join(dir, "root"))
	if err != nil {
		return err
	}
	if spec.Image != "" {
		if err := layOver(spec.Image, root); err != nil {
			return fmt.Errorf("lay the image %s over the root: %w", spec.Image, err)
		}
	}
	mounts := slices.Clone(spec.Mounts)
	if spec.MessagePath != "" {
		mounts = append(mounts, Mount{Source: filepath.Join(dir, MessageFile), Target: spec.MessagePath})
	}
	sources, err := openSources(mounts)
	if err != nil {
		return err
	}
	sys, err := cloneMount(Mount{Source: "/sys", Target: "/sys", ReadOnly: true})
	if err != nil {
		return err
	}
	if err := pivot(root); err != nil {
		return err
	}
	if err := mountSystem(sys); err != nil {
		return err
	}
	for _, source := range sources {
		if err := source.attach(); err != nil {
			return err
		}
	}
	if spec.ReadOnlyRoot {
		if err := unix.MountSetattr(unix.AT_FDCWD, "/", 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fmt.Errorf("make the root read-only: %w", err)
		}
	}
	return nil
}

// mountRoot mounts a writable copy of the machine's root and returns where it is. Changes stay in memory.
func mountRoot(dir string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=755"); err != nil {
		return "", fmt.Errorf("mount a tmpfs for the container's files: %w", err)
	}
	upper, work, merged := filepath.Join(dir, "upper"), filepath.Join(dir, "work"), filepath.Join(dir, "merged")
	for _, d := range []string{upper, work, merged} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return "", err
		}
	}
	if err := unix.Mount("overlay", merged, "overlay", 0, "lowerdir=/,upperdir="+upper+",workdir="+work); err != nil {
		return "", fmt.Errorf("mount an overlay of /: %w", err)
	}
	return merged, nil
}

// layOver copies the files of an image into the tree. An image is on the same file system as the machine's root, and an
// overlay refuses a layer inside another one. So the image cannot be a layer itself.
func layOver(image, tree string) error {
	root, err := os.OpenRoot(tree) // a link of the machine such as /bin must not lead out of the tree
	if err != nil {
		return err
	}
	defer root.Close()
	files := os.DirFS(image)
	return fs.WalkDir(files, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return root.MkdirAll(name, info.Mode().Perm())
		}
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if info.Mode().Type() == fs.ModeSymlink {
			target, err := os.Readlink(filepath.Join(image, name))
			if err != nil {
				return err
			}
			return root.Symlink(target, name)
		}
		return copyFile(root, files, name, info.Mode().Perm())
	})
}

func copyFile(root *os.Root, files fs.FS, name string, mode fs.FileMode) (err error) {
	from, err := files.Open(name)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	_, err = io.Copy(to, from)
	return err
}

// pivot makes dir the root of the mount namespace and takes the machine's root out of it.
func pivot(dir string) error {
	if err := os.Chdir(dir); err != nil {
		return err
	}
	// The old root is put on top of the new one. The current directory then is below the old root, so "." names the old root.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("make %s the root: %w", dir, err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("take the old root away: %w", err)
	}
	return os.Chdir("/")
}

// A source is a mount that is not yet in the tree.
type source struct {
	fd     int
	target string
	isDir  bool
}

// openSources clones the mounts while the machine's files can still be seen. Parents come before their children.
func openSources(mounts []Mount) ([]source, error) {
	mounts = slices.Clone(mounts)
	slices.SortStableFunc(mounts, func(a, b Mount) int { return depth(a.Target) - depth(b.Target) })
	sources := make([]source, 0, len(mounts))
	for _, m := range mounts {
		s, err := cloneMount(m)
		if err != nil {
			return nil, err
		}
		sources = append(sources, s)
	}
	return sources, nil
}

func depth(target string) int { return strings.Count(path.Clean(target), "/") }

func cloneMount(m Mount) (source, error) {
	info, err := os.Stat(m.Source)
	if err != nil {
		return source{}, err
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, m.Source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	if err != nil {
		return source{}, fmt.Errorf("clone the mount of %s: %w", m.Source, err)
	}
	if m.ReadOnly {
		attributes := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attributes); err != nil {
			return source{}, fmt.Errorf("make the mount of %s read-only: %w", m.Source, err)
		}
	}
	return source{fd: fd, target: m.Target, isDir: info.IsDir()}, nil
}

// attach puts the mount into the tree. It runs after pivot, so links in the target's path stay inside the container.
func (s source) attach() error {
	if err := makeTarget(s.target, s.isDir); err != nil {
		return err
	}
	if err := unix.MoveMount(s.fd, "", unix.AT_FDCWD, s.target, unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_SYMLINKS); err != nil {
		return fmt.Errorf("mount %s: %w", s.target, err)
	}
	return unix.Close(s.fd)
}

func makeTarget(target string, isDir bool) error {
	if isDir {
		return os.MkdirAll(target, 0o755)
	}
	if err := os.MkdirAll(path.Dir(target), 0o755); err != nil {
		return err
	}
	file, err := os.OpenFile(target, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	return file.Close()
}
