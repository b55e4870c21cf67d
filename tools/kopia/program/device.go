package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"github.com/alecthomas/kingpin/v2"
	"github.com/pkg/errors"
	"golang.org/x/sys/unix"
)

// blockSize is the size of all blocks.
// Source: Velero main at d2241adba, pkg/uploader/block/uploader.go, pkg/repository/udmrepo/kopialib/lib_repo.go.
const blockSize = 1 << 20

var zeroBlock = make([]byte, blockSize)

// errShort is no end of a file, after which kopia has all of it, and has no text of a storage that closes a connection.
var errShort = errors.New("the device has become shorter")

// device is an open block device, or a file in its place.
type device struct {
	file  *os.File
	size  int64
	holes atomic.Bool

	readBytes atomic.Int64
}

// deviceFlags adds the flags for an open device; openDevice refuses what they have by default.
func deviceFlags(command *kingpin.CmdClause) (*int, *int64) {
	return command.Flag("device-fd", "Inherited descriptor of the device").Int(),
		command.Flag("device-size", "Size of the device, in bytes").Int64()
}

// openDevice takes over a descriptor that this process has inherited, which must be of a device with this size: no path
// could name another one by now.
func openDevice(fd int, size int64, writable bool) (*device, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil || fd <= int(os.Stderr.Fd()) {
		return nil, errors.Errorf("descriptor %v is not of an open device", fd)
	}

	if kind := stat.Mode & unix.S_IFMT; kind != unix.S_IFBLK && kind != unix.S_IFREG {
		return nil, errors.Errorf("descriptor %v is neither of a block device nor of a file", fd)
	}

	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return nil, errors.Wrap(err, "device")
	}

	if mode := flags & unix.O_ACCMODE; mode != unix.O_RDWR && (writable || mode != unix.O_RDONLY) {
		return nil, errors.Errorf("descriptor %v is open for something else", fd)
	}

	found, err := unix.Seek(fd, 0, io.SeekEnd)
	if err != nil {
		return nil, errors.Wrap(err, "device")
	}

	if found != size || size <= 0 {
		return nil, errors.Errorf("the device has %v bytes, not %v", found, size)
	}

	// What is read ahead lies across two blocks, is used twice, and stays.
	_ = unix.Fadvise(fd, 0, 0, unix.FADV_RANDOM)

	opened := &device{file: os.NewFile(uintptr(fd), "device"), size: size}
	opened.holes.Store(true)

	return opened, nil
}

// blocks returns in how many blocks that many bytes are.
func blocks(size int64) int { return int((size + blockSize - 1) / blockSize) }

// read reads a block into a buffer of its size; beyond the end of the device the block has zeros.
func (d *device) read(block int, buffer []byte) error {
	start := int64(block) * blockSize
	length := min(blockSize, d.size-start)
	clear(buffer[length:])

	if _, err := d.file.ReadAt(buffer[:length], start); errors.Is(err, io.EOF) {
		return errors.Wrapf(errShort, "read the device at %v", start)
	} else if err != nil {
		return errors.Wrapf(err, "read the device at %v", start)
	}

	d.readBytes.Add(length)
	d.forget(start, length)

	return nil
}

// forget keeps the kernel from keeping what was read in memory that counts as the pod's: nothing reads it again.
func (d *device) forget(start, length int64) {
	_ = unix.Fadvise(int(d.file.Fd()), start, length, unix.FADV_DONTNEED)
}

// deviceReader reads a device once, from its start.
type deviceReader struct {
	device *device
	at     int64
}

func newDeviceReader(from *device) *deviceReader {
	_ = unix.Fadvise(int(from.file.Fd()), 0, 0, unix.FADV_SEQUENTIAL)

	return &deviceReader{device: from}
}

// Read implements io.Reader.
func (r *deviceReader) Read(buffer []byte) (int, error) {
	count, err := io.NewSectionReader(r.device.file, r.at, r.device.size-r.at).Read(buffer)
	read := r.at / blockSize
	r.at += int64(count)

	// kopia reads a block in many pieces.
	if whole := r.at / blockSize; whole > read {
		r.device.forget(read*blockSize, (whole-read)*blockSize)
	}

	if errors.Is(err, io.EOF) && r.at < r.device.size {
		err = errors.Wrapf(errShort, "read the device at %v", r.at)
	}

	return count, err
}

// zero makes a range read as zeros: by a hole, or where the device does not support that by writing them.
func (d *device) zero(start, length int64) error {
	if d.holes.Load() {
		err := unix.Fallocate(int(d.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, start, length)
		if err == nil {
			return nil
		}

		// Any other error may concern this range only.
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
			d.holes.Store(false)
		}
	}

	for end := start + length; start < end; start += blockSize {
		if err := d.write(start, zeroBlock[:min(blockSize, end-start)]); err != nil {
			return err
		}
	}

	return nil
}

func (d *device) write(start int64, data []byte) error {
	_, err := d.file.WriteAt(data, start)

	return errors.Wrapf(err, "write to the device at %v", start)
}

// isZero returns whether a block, or a part of one, has only zeros.
func isZero(data []byte) bool { return bytes.Equal(data, zeroBlock[:len(data)]) }

// inParallel calls work for each number below count, each time with a buffer of one block, until one call fails.
func inParallel(ctx context.Context, count, parallel int, work func(ctx context.Context, at int, buffer []byte) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	var (
		next    atomic.Int64
		workers sync.WaitGroup
	)

	for range max(1, min(parallel, count)) {
		workers.Go(func() {
			buffer := make([]byte, blockSize)

			for at := int(next.Add(1)) - 1; at < count && ctx.Err() == nil; at = int(next.Add(1)) - 1 {
				if err := work(ctx, at, buffer); err != nil {
					cancel(err)
				}
			}
		})
	}

	workers.Wait()

	return context.Cause(ctx)
}
