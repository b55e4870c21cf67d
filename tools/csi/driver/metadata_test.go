package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"reflect"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// received is what a client of a stream has got: offsets and lengths, and the number of messages.
type received struct {
	parts    [][2]int64
	messages int
	capacity int64
}

func (r *received) take(capacity int64, parts []*csi.BlockMetadata) error {
	r.messages, r.capacity = r.messages+1, capacity
	for _, part := range parts {
		r.parts = append(r.parts, [2]int64{part.ByteOffset, part.SizeBytes})
	}
	return nil
}

type allocated struct {
	grpc.ServerStream
	got *received
}

func (allocated) Context() context.Context { return context.Background() }

func (a allocated) Send(m *csi.GetMetadataAllocatedResponse) error {
	return a.got.take(m.VolumeCapacityBytes, m.BlockMetadata)
}

type delta struct {
	grpc.ServerStream
	got *received
}

func (delta) Context() context.Context { return context.Background() }

func (d delta) Send(m *csi.GetMetadataDeltaResponse) error {
	return d.got.take(m.VolumeCapacityBytes, m.BlockMetadata)
}

const grown = 3*chunk + 2*grain - 512

// withSnapshots is a driver with snapshots, each with some grains that are not zero.
func withSnapshots(t *testing.T) *driver {
	d := &driver{store: &store{t.TempDir()}, faults: &faults{}, locks: newLocks()}
	for _, one := range []struct {
		snapshot
		filled []int64
	}{
		{snapshot{ID: "old", Volume: "a", Bytes: 2 * chunk}, []int64{0, 9 * grain}},
		{snapshot{ID: "new", Volume: "a", Bytes: grown}, []int64{0, chunk, chunk + grain, chunk + 3*grain, grown - grain}},
		{snapshot{ID: "other", Volume: "b", Bytes: grown}, nil},
	} {
		if err := write(d.store.snapshot(one.ID)+".json", one.snapshot); err != nil {
			t.Fatal(err)
		}
		file, err := os.Create(d.store.snapshot(one.ID))
		for _, at := range one.filled {
			_, failed := file.WriteAt(bytes.Repeat([]byte{1}, grain), at)
			err = errors.Join(err, failed)
		}
		if err := errors.Join(err, file.Truncate(one.Bytes), file.Close()); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

func TestPartsAreThoseThatDiffer(t *testing.T) {
	d := withSnapshots(t)
	end := [2]int64{3 * chunk, 2*grain - 512}
	for _, one := range []struct {
		base       string
		from       int64
		most, sent int
		want       [][2]int64
	}{
		{"", 0, 0, 1, [][2]int64{{0, grain}, {chunk, 2 * grain}, {chunk + 3*grain, grain}, end}},
		{"", chunk + grain, 1, 3, [][2]int64{{chunk + grain, grain}, {chunk + 3*grain, grain}, end}},
		{"", grown, 0, 0, nil},
		{"old", 0, 2, 2, [][2]int64{{9 * grain, grain}, {chunk, 2 * grain}, {chunk + 3*grain, grain}, end}},
		{"new", 0, 0, 0, nil},
	} {
		got := &received{}
		var err error
		if one.base == "" {
			in := &csi.GetMetadataAllocatedRequest{SnapshotId: "new", StartingOffset: one.from, MaxResults: int32(one.most)}
			err = d.GetMetadataAllocated(in, allocated{got: got})
		} else {
			in := &csi.GetMetadataDeltaRequest{BaseSnapshotId: one.base, TargetSnapshotId: "new", MaxResults: int32(one.most)}
			err = d.GetMetadataDelta(in, delta{got: got})
		}
		if err != nil || !reflect.DeepEqual(got.parts, one.want) || got.messages != one.sent || one.sent > 0 && got.capacity != grown {
			t.Errorf("since %q from %d: %+v, %v", one.base, one.from, got, err)
		}
	}
}

func TestQuestionsThatCannotBeAnsweredAreErrors(t *testing.T) {
	d := withSnapshots(t)
	for _, one := range []struct {
		base, id string
		from     int64
		want     codes.Code
	}{
		{"", "new", 0, codes.InvalidArgument},
		{"old", "", 0, codes.InvalidArgument},
		{"gone", "new", 0, codes.NotFound},
		{"old", "gone", 0, codes.NotFound},
		{"other", "new", 0, codes.InvalidArgument},
		{"old", "new", -1, codes.OutOfRange},
		{"old", "new", grown + 1, codes.OutOfRange},
	} {
		in := &csi.GetMetadataDeltaRequest{BaseSnapshotId: one.base, TargetSnapshotId: one.id, StartingOffset: one.from}
		if err := d.GetMetadataDelta(in, delta{got: &received{}}); status.Code(err) != one.want {
			t.Errorf("%+v: %v", one, err)
		}
	}
}

func TestAnswersAreWrongOnRequest(t *testing.T) {
	for _, one := range []struct {
		fault, value string
		want         received
		code         codes.Code
	}{
		{"", "", received{[][2]int64{{0, 2 * grain}, {chunk, grain}}, 2, 2 * chunk}, codes.OK},
		{"fixed", "", received{[][2]int64{{0, grain}, {grain, grain}, {chunk, grain}}, 3, 2 * chunk}, codes.OK},
		{"unavailable", "", received{}, codes.Unavailable},
		{"break", "1", received{[][2]int64{{0, 2 * grain}}, 1, 2 * chunk}, codes.Internal},
		{"break", "9", received{[][2]int64{{0, 2 * grain}, {chunk, grain}}, 2, 2 * chunk}, codes.Internal},
		{"capacity", "", received{[][2]int64{{0, 2 * grain}, {chunk, grain}}, 2, 2*chunk + grain}, codes.OK},
		{"overlap", "", received{[][2]int64{{0, 2 * grain}, {chunk, grain}, {0, grain}}, 3, 2 * chunk}, codes.OK},
		{"beyond", "", received{[][2]int64{{0, 2 * grain}, {chunk, grain}, {2 * chunk, grain}}, 3, 2 * chunk}, codes.OK},
		{"forget", "", received{}, codes.OK},
	} {
		a := &answer{capacity: 2 * chunk, parts: []*csi.BlockMetadata{
			{ByteOffset: 0, SizeBytes: 2 * grain}, {ByteOffset: chunk, SizeBytes: grain},
		}}
		got := &received{}
		err := a.spoil(one.fault, one.value)
		if err == nil {
			err = a.send(1, func(some []*csi.BlockMetadata) error { return got.take(a.capacity, some) })
		}
		if status.Code(err) != one.code || !reflect.DeepEqual(*got, one.want) {
			t.Errorf("%s: %+v, %v", one.fault, got, err)
		}
	}
}
