// Package weights keeps a model's weights near: in the page cache, or as a copy on local disk. So the server of the
// next trial does not have to read them from a file server. The package never downloads a model and knows nothing of
// servers. It is for Linux.
package weights

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// A File is one of a model's files.
type File struct {
	Path string
	Size int64 // bytes
}

// A Report says what Warm or Copy did.
type Report struct {
	Bytes       int64         // size of all files
	WasResident int64         // bytes that were in the page cache before; -1 when the kernel does not tell, and for a copy
	NowResident int64         // bytes in the page cache now; less than Bytes if memory was short; -1 as for WasResident
	Read        int64         // bytes read or copied
	Took        time.Duration // including the wait for another tuner
	Skipped     string        // why nothing was read or copied; empty when something was
}

const (
	// workers is how many goroutines read at once. A file server answers several parallel requests in the time of one.
	// Parallel reads do not make a local disk slower.
	workers = 4
	// segmentSize is how many bytes a worker takes on at a time. The kernel reads ahead a whole segment, even if the
	// worker is then told to stop.
	segmentSize = 64 << 20
	blockSize   = 8 << 20 // bytes of one read
)

// A segment is a part of a file.
type segment struct {
	file           int // index in the list of files
	offset, length int64
}

// segments cuts the files into segments, in their order.
func segments(files []File) []segment {
	var all []segment
	for i, f := range files {
		for offset := int64(0); offset < f.Size; offset += segmentSize {
			all = append(all, segment{i, offset, min(segmentSize, f.Size-offset)})
		}
	}
	return all
}

// inParallel handles the segments in order, several at once, until one call fails or ctx ends. Each worker has its own
// buffer.
func inParallel(ctx context.Context, all []segment, handle func(ctx context.Context, s segment, buffer []byte) error) error {
	group, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range min(workers, len(all)) {
		group.Go(func() error {
			buffer := make([]byte, blockSize)
			for i := next.Add(1) - 1; i < int64(len(all)); i = next.Add(1) - 1 {
				if err := handle(ctx, all[i], buffer); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

// read reads a segment of a file block by block, and hands on each block with its offset.
func read(ctx context.Context, path string, s segment, buffer []byte, handle func(block []byte, offset int64) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	// This call is only advice. A file system that does not support it reads normally.
	_ = unix.Fadvise(int(f.Fd()), s.offset, s.length, unix.FADV_WILLNEED)
	for end := s.offset + s.length; s.offset < end; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		block := buffer[:min(int64(len(buffer)), end-s.offset)]
		if _, err := f.ReadAt(block, s.offset); err == io.EOF {
			return fmt.Errorf("%s was shortened while it was read", path)
		} else if err != nil {
			return err // the error names the file
		}
		if err := handle(block, s.offset); err != nil {
			return err
		}
		s.offset += int64(len(block))
	}
	return nil
}

// A tally counts the bytes that all workers have done. It reports them to a listener, one call at a time.
type tally struct {
	mu    sync.Mutex
	done  int64
	total int64
	tell  func(done, total int64) // may be nil
}

func (t *tally) add(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.done += n
	if t.tell != nil {
		t.tell(t.done, t.total)
	}
}

// sum returns the size of all files in bytes.
func sum(files []File) (n int64) {
	for _, f := range files {
		n += f.Size
	}
	return n
}

// magics maps magic numbers to the names of the file systems that models lie on (linux/magic.h and the file systems'
// own headers). All versions of NFS share one number, and so do ext2 to ext4.
var magics = map[int64]string{
	unix.NFS_SUPER_MAGIC: "nfs", unix.CIFS_SUPER_MAGIC: "cifs", unix.SMB2_SUPER_MAGIC: "cifs", unix.CEPH_SUPER_MAGIC: "ceph",
	unix.V9FS_MAGIC: "9p", unix.FUSE_SUPER_MAGIC: "fuse", 0x0bd00bd0: "lustre", 0x47504653: "gpfs", 0x19830326: "beegfs",
	unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", 0x2fc12fc1: "zfs",
	unix.OVERLAYFS_SUPER_MAGIC: "overlay", unix.TMPFS_MAGIC: "tmpfs", unix.RAMFS_MAGIC: "ramfs",
}

// Filesystem returns the type of a path's file system, such as nfs, ext4, overlay or tmpfs. An unknown type is its
// magic number in hexadecimal. A path that cannot be examined gives "unknown".
func Filesystem(path string) string {
	var s unix.Statfs_t
	if err := unix.Statfs(path, &s); err != nil {
		return "unknown"
	}
	if name, ok := magics[int64(s.Type)]; ok {
		return name
	}
	return fmt.Sprintf("%#x", s.Type)
}
