// Package faultfs is a disk that fails when and how a test wants. It mounts a directory a second time by FUSE and
// numbers each call. It is for tests alone and never fails by itself.
package faultfs

import (
	"errors"
	"io"
	"log"
	"math"
	"path"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// A Call is a request of the kernel to the disk.
type Call struct {
	N    int    // number of the call, from 1
	Op   string // such as "write"
	Path string // path below the mounted directory; the old path of a rename
}

// Changes reports whether the call would change the disk.
func (c Call) Changes() bool {
	switch c.Op {
	case "create", "mkdir", "rename", "rmdir", "setattr", "unlink", "write":
		return true
	}
	return false
}

// A Fault says what happens to a call. With the zero Fault the call is done normally.
type Fault struct {
	Before func()        // called first, for example to kill the caller or to make it wait
	Skip   bool          // the call is not done
	Half   bool          // only the first half of a write is done
	Errno  syscall.Errno // the caller gets this error; 0 means the call's own result
	After  func()        // called last, before the caller gets the result
}

// A Mount is a directory that is mounted a second time. It does one call at a time.
type Mount struct {
	server *fuse.Server
	disk   *disk
}

// kind is the type of file system that the mount reports. Package fence treats locks on this type as shared. With an
// unknown type, a takeover would wait for the TTL.
const kind = "ceph-fuse"

// New mounts the directory dir a second time, at mountPoint, until Close. For each call, it asks the function fault
// what happens to the call. New needs root and /dev/fuse.
func New(dir, mountPoint string, fault func(Call) Fault) (*Mount, error) {
	root, err := fs.NewLoopbackRoot(dir)
	if err != nil {
		return nil, err
	}
	forget := time.Duration(0) // 0, or the kernel would answer from its cache
	options := &fs.Options{EntryTimeout: &forget, AttrTimeout: &forget, NegativeTimeout: &forget, MountOptions: fuse.MountOptions{
		Name: kind, FsName: dir, EnableLocks: true, DirectMountStrict: true, DisableReadDirPlus: true, DisableXAttrs: true,
		Logger: log.New(io.Discard, "", 0),
	}}
	d := &disk{RawFileSystem: fs.NewNodeFS(root, options), fault: fault, nodes: map[uint64]*node{}}
	if d.nodes[fuse.FUSE_ROOT_ID], err = load(dir); err != nil {
		return nil, err
	}
	server, err := fuse.NewServer(d, mountPoint, &options.MountOptions)
	if err != nil {
		return nil, err
	}
	// A child that outlives this process must not hold the FUSE device. Otherwise a process that uses the disk would
	// wait for ever.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return nil, errors.Join(err, server.Unmount())
	}
	go server.Serve() // runs until Close
	// WaitMount opens a file in the mount. A child that is forked in this time inherits the file and closes it before
	// exec. This process must answer that close, but the garbage collector may have stopped it until the child has
	// started. So no child may be forked during WaitMount.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return &Mount{server, d}, server.WaitMount()
}

// Close unmounts the directory once all its files are closed. A killed process closes its files a moment later.
func (m *Mount) Close() error {
	for range 1000 {
		m.disk.mu.Lock()
		open := m.disk.opened
		m.disk.mu.Unlock()
		if open <= 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	return m.server.Unmount()
}

// A disk passes calls on to a directory. It does not number calls that close a file, because they have no result.
type disk struct {
	fuse.RawFileSystem
	fault func(Call) Fault

	mu     sync.Mutex // guards the fields below, and the directory
	calls  int
	opened int              // number of open files
	nodes  map[uint64]*node // by the kernel's node IDs
}

// perform does one call, with the fault that the test wants for it. If the call is about a directory entry, nodeID is
// the ID of the directory.
func (d *disk) perform(op string, nodeID uint64, name string, do func(half bool) fuse.Status) fuse.Status {
	d.mu.Lock()
	d.calls++
	c := Call{N: d.calls, Op: op}
	if n := d.nodes[nodeID]; n != nil {
		c.Path = path.Join(n.path(), name)
	}
	d.mu.Unlock()
	fault := d.fault(c)
	if fault.Before != nil {
		fault.Before()
	}
	status := fuse.OK
	if !fault.Skip {
		d.mu.Lock()
		status = do(fault.Half)
		d.mu.Unlock()
	}
	if fault.Errno != 0 {
		status = fuse.Status(fault.Errno)
	}
	if fault.After != nil {
		fault.After()
	}
	return status
}

// learn stores the kernel's node ID of a directory entry.
func (d *disk) learn(dir uint64, name string, number uint64) {
	if parent := d.nodes[dir]; parent != nil && parent.names[name] != nil {
		d.nodes[number] = parent.names[name]
	}
}

func (d *disk) Lookup(cancel <-chan struct{}, in *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	return d.perform("lookup", in.NodeId, name, func(bool) fuse.Status {
		status := d.RawFileSystem.Lookup(cancel, in, name, out)
		if status.Ok() {
			d.learn(in.NodeId, name, out.NodeId)
		}
		return status
	})
}

func (d *disk) GetAttr(cancel <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	return d.perform("getattr", in.NodeId, "", func(bool) fuse.Status { return d.RawFileSystem.GetAttr(cancel, in, out) })
}

func (d *disk) SetAttr(cancel <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	return d.perform("setattr", in.NodeId, "", func(bool) fuse.Status { return d.RawFileSystem.SetAttr(cancel, in, out) })
}

func (d *disk) Mkdir(cancel <-chan struct{}, in *fuse.MkdirIn, name string, out *fuse.EntryOut) fuse.Status {
	return d.perform("mkdir", in.NodeId, name, func(bool) fuse.Status {
		status := d.RawFileSystem.Mkdir(cancel, in, name, out)
		if status.Ok() {
			d.nodes[in.NodeId].add(name, true)
			d.learn(in.NodeId, name, out.NodeId)
		}
		return status
	})
}

func (d *disk) Unlink(cancel <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	return d.remove("unlink", in, name, func() fuse.Status { return d.RawFileSystem.Unlink(cancel, in, name) })
}

func (d *disk) Rmdir(cancel <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	return d.remove("rmdir", in, name, func() fuse.Status { return d.RawFileSystem.Rmdir(cancel, in, name) })
}

// remove is like perform, for calls that remove a directory entry.
func (d *disk) remove(op string, in *fuse.InHeader, name string, do func() fuse.Status) fuse.Status {
	return d.perform(op, in.NodeId, name, func(bool) fuse.Status {
		status := do()
		if status.Ok() {
			delete(d.nodes[in.NodeId].names, name)
		}
		return status
	})
}

func (d *disk) Rename(cancel <-chan struct{}, in *fuse.RenameIn, name, newName string) fuse.Status {
	return d.perform("rename", in.NodeId, name, func(bool) fuse.Status {
		status := d.RawFileSystem.Rename(cancel, in, name, newName)
		if status.Ok() {
			d.nodes[in.NodeId].move(name, d.nodes[in.Newdir], newName)
		}
		return status
	})
}

func (d *disk) Create(cancel <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	in.Flags &^= syscall.O_DIRECT
	status := d.open("create", in.NodeId, name, func() fuse.Status {
		status := d.RawFileSystem.Create(cancel, in, name, out)
		if status.Ok() {
			d.nodes[in.NodeId].add(name, false)
			d.learn(in.NodeId, name, out.NodeId)
		}
		return status
	}, func() {
		d.Release(nil, &fuse.ReleaseIn{InHeader: fuse.InHeader{NodeId: out.NodeId}, Fh: out.Fh})
		d.Forget(out.NodeId, 1)
	})
	out.OpenFlags |= fuse.FOPEN_DIRECT_IO
	return status
}

// Open makes the kernel bypass its page cache, so that every read and write becomes a call.
func (d *disk) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	in.Flags &^= syscall.O_DIRECT // O_DIRECT needs aligned buffers, and ours are not aligned
	status := d.open("open", in.NodeId, "", func() fuse.Status { return d.RawFileSystem.Open(cancel, in, out) },
		func() { d.Release(nil, &fuse.ReleaseIn{InHeader: in.InHeader, Fh: out.Fh}) })
	out.OpenFlags |= fuse.FOPEN_DIRECT_IO
	return status
}

func (d *disk) OpenDir(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	return d.open("opendir", in.NodeId, "", func() fuse.Status { return d.RawFileSystem.OpenDir(cancel, in, out) },
		func() { d.ReleaseDir(&fuse.ReleaseIn{InHeader: in.InHeader, Fh: out.Fh}) })
}

// open is like perform, for calls that open a file or directory. If the file is open but the kernel gets an error, the
// kernel will not close it. In this case, open calls the function release.
func (d *disk) open(op string, node uint64, name string, do func() fuse.Status, release func()) fuse.Status {
	opened := false
	status := d.perform(op, node, name, func(bool) fuse.Status {
		status := do()
		if opened = status.Ok(); opened {
			d.opened++
		}
		return status
	})
	if opened && !status.Ok() {
		release()
	}
	return status
}

func (d *disk) Release(cancel <-chan struct{}, in *fuse.ReleaseIn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.RawFileSystem.Release(cancel, in)
	d.opened--
}

func (d *disk) Read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (result fuse.ReadResult, status fuse.Status) {
	status = d.perform("read", in.NodeId, "", func(bool) (s fuse.Status) {
		result, s = d.RawFileSystem.Read(cancel, in, buf)
		return s
	})
	return result, status
}

func (d *disk) Write(cancel <-chan struct{}, in *fuse.WriteIn, data []byte) (n uint32, status fuse.Status) {
	status = d.perform("write", in.NodeId, "", func(half bool) (s fuse.Status) {
		if half {
			data = data[:len(data)/2]
		}
		n, s = d.RawFileSystem.Write(cancel, in, data)
		return s
	})
	return n, status
}

// Writev is not supported, so that the kernel makes one Write of the pieces.
func (d *disk) Writev(<-chan struct{}, *fuse.WriteIn, [][]byte) (uint32, fuse.Status) {
	return 0, fuse.ENOSYS
}

// CopyFileRange is not supported, so that the caller makes reads and writes instead.
func (d *disk) CopyFileRange(<-chan struct{}, *fuse.CopyFileRangeIn) (uint32, fuse.Status) {
	return 0, fuse.ENOSYS
}

func (d *disk) GetLk(cancel <-chan struct{}, in *fuse.LkIn, out *fuse.LkOut) fuse.Status {
	return d.perform("getlk", in.NodeId, "", func(bool) fuse.Status { return d.RawFileSystem.GetLk(cancel, in, out) })
}

func (d *disk) SetLk(cancel <-chan struct{}, in *fuse.LkIn) fuse.Status {
	return d.perform("setlk", in.NodeId, "", func(bool) fuse.Status { return d.RawFileSystem.SetLk(cancel, in) })
}

func (d *disk) Flush(cancel <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	return d.perform("flush", in.NodeId, "", func(bool) fuse.Status { return d.RawFileSystem.Flush(cancel, in) })
}

func (d *disk) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	return d.sync("fsync", in, func() fuse.Status { return d.RawFileSystem.Fsync(cancel, in) })
}

func (d *disk) FsyncDir(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	return d.sync("fsyncdir", in, func() fuse.Status { return d.RawFileSystem.FsyncDir(cancel, in) })
}

// sync is like perform, for calls that sync a file or directory.
func (d *disk) sync(op string, in *fuse.FsyncIn, do func() fuse.Status) fuse.Status {
	return d.perform(op, in.NodeId, "", func(bool) fuse.Status {
		status := do()
		if status.Ok() {
			d.nodes[in.NodeId].keep(d.base())
		}
		return status
	})
}

func (d *disk) ReleaseDir(in *fuse.ReleaseIn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.RawFileSystem.ReleaseDir(in)
	d.opened--
}

func (d *disk) ReadDir(cancel <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	return d.perform("readdir", in.NodeId, "", func(bool) fuse.Status { return d.RawFileSystem.ReadDir(cancel, in, out) })
}

func (d *disk) StatFs(cancel <-chan struct{}, in *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	return d.perform("statfs", in.NodeId, "", func(bool) fuse.Status { return d.RawFileSystem.StatFs(cancel, in, out) })
}

// base returns the path of the directory that is mounted.
func (d *disk) base() string { return d.nodes[fuse.FUSE_ROOT_ID].name }
