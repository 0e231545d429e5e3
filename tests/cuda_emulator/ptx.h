// In place of ptx.cuh on a CPU: functions of the same names.
typedef unsigned short half_t;
typedef unsigned int u32;
typedef unsigned long long u64;

inline half_t narrow(float x) {
    u32 bits = __float_as_uint(x);
    if constexpr (BFLOAT16) {
        if (x != x) return 0x7fff;
        return (half_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    } else {
        if (x != x) return 0x7fff;
        _Float16 y = (_Float16)x;
        half_t z;
        std::memcpy(&z, &y, 2);
        return z;
    }
}
inline float widen(half_t x) {
    if constexpr (BFLOAT16) return __uint_as_float((u32)x << 16);
    _Float16 y;
    std::memcpy(&y, &x, 2);
    return (float)y;
}
inline u32 pack(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }

inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const int lane = emulator::lane(), r = lane / 4, q = lane % 4;
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const auto& words = emulator::together(mine, 6);
    for (int j = 0; j < 4; j++) {
        const int row = r + 8 * (j / 2), column = 2 * q + j % 2;
        for (int k = 0; k < 16; k++) {
            const u32 left = words[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
            const u32 right = words[column * 4 + k % 8 / 2][4 + k / 8];
            c[j] += widen((half_t)(left >> 16 * (k % 2))) * widen((half_t)(right >> 16 * (k % 2)));
        }
    }
}

inline u32 shared_address(const void* p) { return (u32)((const char*)p - emulator::shared_memory()); }
inline void copy_async(u32 to, const void* from, bool wanted) {
    char* place = emulator::shared_memory() + to;
    if (wanted) emulator::current->open.push_back([=] { std::memcpy(place, from, 16); });
}
template <int COUNT> inline void write_shared(u32 to, const float (&v)[COUNT]) {
    std::memcpy(emulator::shared_memory() + to, v, sizeof v);
}
inline void write_vector(void* to, const uint4& v, bool wanted) {
    if (wanted) std::memcpy(to, &v, 16);
}
inline void copy_commit() {
    emulator::current->groups.push_back(std::move(emulator::current->open));
    emulator::current->open.clear();
}
template <int PENDING> inline void copy_wait() {
    auto& groups = emulator::current->groups;
    while ((int)groups.size() > PENDING) {
        for (auto& copy : groups.front()) copy();
        groups.erase(groups.begin());
    }
}
inline void read_relaxed(uint4& v, const half_t* p, bool wanted) {
    if (wanted) std::memcpy(&v, p, 16);
}
inline void write_relaxed(half_t* p, half_t v, bool wanted) {
    if (wanted) *p = v;
}
inline u32 larger(u32 a, u32 b) {
    const u32 high = std::max(a >> 16, b >> 16), low = std::max(a & 0xffffu, b & 0xffffu);
    return high << 16 | low;
}
inline void fence() {}
inline const half_t* anew(const half_t* p) { return p; }
template <typename T> inline T pinned(T x) { return x; }
template <int THREADS> inline void barrier_sync(int b) { emulator::wait(emulator::current->block->barriers[b], THREADS); }
template <int THREADS> inline void barrier_arrive(int b) { emulator::arrive(emulator::current->block->barriers[b], THREADS); }
template <int COUNT> inline void registers_more() {}
template <int COUNT> inline void registers_fewer() {}
