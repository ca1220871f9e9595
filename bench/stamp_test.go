package bench

import (
	"context"
	"math"
	"net"
	"runtime/metrics"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"vllmtuner/bench/workload"
)

// accepting returns the address of a listener, and a function that accepts a connection.
func accepting(t *testing.T) (address string, accept func() net.Conn) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	return listener.Addr().String(), func() net.Conn {
		conn, err := listener.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
}

// stamping waits until the kernel stamps arriving bytes. A busy kernel may need longer than awaitStamps waits (50 ms).
func stamping(t *testing.T) {
	t.Helper()
	for begin := time.Now(); time.Since(begin) < 30*time.Second; {
		tried := time.Now()
		t.Cleanup(awaitStamps())
		if time.Since(tried) < 50*time.Millisecond {
			return
		}
	}
}

// clientWait is how long bytes wait for the client, as if it got no processor. A busy machine may interrupt a reading
// of the clock. The reading is then wrong by the length of the interruption. The tests allow half of clientWait for
// this error.
const clientWait = 60 * time.Millisecond

// deliver writes five bytes and waits until the socket at the other end has them. The kernel stamps the bytes between
// the two returned times. Then deliver waits for clientWait.
func deliver(t *testing.T, there net.Conn, fd int) (before, after time.Time) {
	t.Helper()
	before = time.Now()
	if _, err := there.Write([]byte("token")); err != nil {
		t.Fatal(err)
	}
	for waiting := 0; waiting < 5; time.Sleep(time.Millisecond) {
		var err error
		if waiting, err = unix.IoctlGetInt(fd, unix.TIOCINQ); err != nil {
			t.Fatal(err)
		}
		if time.Since(before) > 30*time.Second {
			t.Fatalf("only %d of 5 bytes came within 30 s", waiting)
		}
		after = time.Now()
	}
	time.Sleep(clientWait)
	return before, after
}

// The time of arrival does not depend on when the client reads the bytes.
func TestBytesAreTimedByTheirArrival(t *testing.T) {
	stamping(t)
	address, accept := accepting(t)
	here, err := new(net.Dialer).DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer here.Close()
	there := accept()
	s, err := newStamped(here.(*net.TCPConn))
	if err != nil {
		t.Fatal(err)
	}
	var buffer [16]byte
	for range 2 {
		var before, after time.Time
		if err := s.raw.Control(func(fd uintptr) { before, after = deliver(t, there, int(fd)) }); err != nil {
			t.Fatal(err)
		}
		n, err := s.Read(buffer[:])
		if err != nil || n != 5 {
			t.Fatalf("Read = %d, %v, want 5 bytes", n, err)
		}
		if s.arrived.Before(before.Add(-clientWait/2)) || s.arrived.After(after.Add(clientWait/2)) || s.read.Sub(after) < clientWait {
			t.Errorf("the bytes arrived %s after the write began and %s before the read, want at most %s and at least %s",
				s.arrived.Sub(before), s.read.Sub(s.arrived), after.Sub(before), clientWait)
		}
	}
}

// If somebody sets the wall clock, the time of arrival still lies between the last two reads.
func TestSettingTheClockMovesNoArrival(t *testing.T) {
	now := time.Now()
	for _, row := range []struct {
		name       string
		stamp      time.Time
		want, last time.Duration // how long before now
	}{
		{"a recent stamp", now.Add(-3 * time.Millisecond), 3 * time.Millisecond, 10 * time.Millisecond},
		{"a stamp from the future", now.Add(time.Hour), 0, 10 * time.Millisecond},
		{"a stamp from before the last read", now.Add(-time.Hour), 10 * time.Millisecond, 10 * time.Millisecond},
	} {
		s := &stamper{drained: now.Add(-row.last)}
		header := (*unix.Cmsghdr)(unsafe.Pointer(&s.control[0]))
		header.Level, header.Type = unix.SOL_SOCKET, unix.SO_TIMESTAMPNS
		*(*unix.Timespec)(unsafe.Pointer(&s.control[unix.CmsgLen(0)])) = unix.NsecToTimespec(row.stamp.UnixNano())
		s.message.SetControllen(unix.CmsgSpace(int(unsafe.Sizeof(unix.Timespec{}))))
		s.noteArrival(now)
		if got := now.Sub(s.arrived); got != row.want {
			t.Errorf("%s: arrived %s ago, want %s", row.name, got, row.want)
		}
	}
	s := &stamper{drained: now.Add(-time.Second)}
	if s.noteArrival(now); !s.arrived.Equal(now) {
		t.Errorf("without a stamp: arrived %s ago, want now", now.Sub(s.arrived))
	}
}

func TestLatenessIsRead(t *testing.T) {
	histogram := func(counts ...uint64) *metrics.Float64Histogram {
		return &metrics.Float64Histogram{Counts: counts, Buckets: []float64{0, 0.001, 0.01, math.Inf(1)}}
	}
	for _, row := range []struct {
		name          string
		before, after *metrics.Float64Histogram
		q             float64
		want          time.Duration
	}{
		{"nothing new", histogram(5, 5, 5), histogram(5, 5, 5), 1, 0},
		{"the longest of the new pauses", histogram(5, 5, 5), histogram(9, 6, 5), 1, 10 * time.Millisecond},
		{"the 99th percentile of the new waits", histogram(0, 0, 0), histogram(990, 10, 0), 0.99, time.Millisecond},
		{"a bucket without upper bound counts with its lower bound", histogram(0, 0, 0), histogram(0, 0, 1), 1, 10 * time.Millisecond},
		{"a histogram that the runtime does not have", nil, nil, 1, 0},
	} {
		if got := quantileSince(row.before, row.after, row.q); got != row.want {
			t.Errorf("%s: %s, want %s", row.name, got, row.want)
		}
	}
	began := readProcessStats()
	for used := cpuTime(); cpuTime()-used < 10*time.Millisecond; { // burn 10 ms of CPU time
	}
	if got := began.since(); got.CPU < 10*time.Millisecond {
		t.Errorf("CPU time %s, want at least 10 ms", got.CPU)
	}
}

// A server that reads a long request slowly does not delay other requests.
func TestALongRequestIsSentAsTheServerReadsIt(t *testing.T) {
	address, accept := accepting(t)
	opened, err := new(Client).open(t.Context(), new(net.Dialer).DialContext, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	p := newPool(func(context.Context) (*conn, error) { return nil, net.ErrClosed })
	if err := p.enter(opened); err != nil {
		t.Fatal(err)
	}
	defer func() {
		p.abort(errPoolClosed)
		p.work.Wait()
	}()
	f := &runState{start: time.Now(), pool: p, ctx: t.Context()}
	f.requests.Add(1)
	x := &exchange{state: f, at: -1, departure: departure{workload.Arrival{Request: new(workload.Request)}, make([]byte, 32<<20)}}
	if !opened.begin(x) { // the test server does not read yet, so a begin that waited for it would hang
		t.Fatal("the new connection is closed")
	}
	conn := accept()
	if err := conn.SetReadDeadline(time.Now().Add(45 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got, buffer := 0, make([]byte, 1<<20)
	for got < len(x.wire) {
		n, err := conn.Read(buffer)
		if got += n; err != nil {
			t.Fatalf("after %d of %d bytes: %v", got, len(x.wire), err)
		}
	}
}
