package weights

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrHidden is returned where the kernel does not tell what is in the page cache. Since 5.2 it says of a file that the caller
// neither owns nor may write that all of it is (mm/mincore.c, can_do_mincore), and gVisor says so of every file.
var ErrHidden = errors.New("the kernel does not tell whether a file is in the page cache to those who neither own it nor may write it")

// windowSize is how much of a file is mapped at once. Its answer takes 256 KiB.
const windowSize = 1 << 30

// Resident returns how many bytes of the files are in the page cache. It reads none of them. It wraps ErrHidden where that
// cannot be known.
func Resident(files []File) (int64, error) {
	var n int64
	for _, file := range files {
		m, err := residentIn(file.Path, 0, file.Size)
		if err != nil {
			return 0, err
		}
		n += m
	}
	return n, nil
}

// residentIn returns how many bytes of a stretch of a file are in the page cache. offset is a multiple of the page size.
func residentIn(path string, offset, length int64) (n int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := honest(f); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	page := int64(os.Getpagesize())
	for end := offset + length; offset < end; offset += windowSize {
		window := min(windowSize, end-offset)
		pages, err := incore(f, offset, window)
		if err != nil {
			return 0, fmt.Errorf("ask what of %s is in the page cache: %w", path, err)
		}
		for i, state := range pages {
			if state&1 != 0 { // the other bits are reserved
				n += min(page, window-int64(i)*page)
			}
		}
	}
	return n, nil
}

// honest asks for a page far behind the end of the file, which cannot be in the page cache: a kernel that says it is says so
// of every page.
func honest(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	const far = 1 << 30 // no page of a file is so large that it reaches behind its end by so much
	pages, err := incore(f, (info.Size()/far+2)*far, 1)
	if err != nil {
		return fmt.Errorf("ask what is in the page cache: %w", err)
	}
	if pages[0]&1 != 0 {
		return ErrHidden
	}
	return nil
}

// incore asks the kernel for a byte to each page of a stretch of the file.
func incore(f *os.File, offset, length int64) ([]byte, error) {
	// What must not be touched cannot be read by mistake.
	mapped, err := unix.Mmap(int(f.Fd()), offset, int(length), unix.PROT_NONE, unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	page := int64(os.Getpagesize())
	pages := make([]byte, (length+page-1)/page)
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(unsafe.SliceData(mapped))), uintptr(length),
		uintptr(unsafe.Pointer(unsafe.SliceData(pages))))
	if err := unix.Munmap(mapped); err != nil {
		return nil, fmt.Errorf("munmap: %w", err)
	}
	if errno != 0 {
		return nil, fmt.Errorf("mincore: %w", errno)
	}
	return pages, nil
}
